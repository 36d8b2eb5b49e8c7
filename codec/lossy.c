#include "codec/lossy.h"

#include "codec/klt.h"
#include "codec/paper.h"

static const cg_preset *const PRESETS[] = {&cg_klt_preset, &cg_paper_preset};

const cg_preset *cg_lossy_preset(uint32_t transforms)
{
    for (size_t i = 0; i < sizeof PRESETS / sizeof *PRESETS; i++) {
        if (PRESETS[i]->transforms == transforms)
            return PRESETS[i];
    }
    return NULL;
}
