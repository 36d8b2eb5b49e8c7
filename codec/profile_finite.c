/* Sums are in f64, where they cannot overflow; a quotient that is infinite in f32 fails, too. */
#include "codec/profile_finite.h"

#include "codec/block_order.h"

#include <math.h>

bool cg_profile_stays_finite(const cg_profile *p, const cg_group *group, unsigned matrix,
                             double most_sum)
{
    if (p->version == CG_PROFILE_VERSION_STEPS)
        most_sum *=
            CG_STEP_FACTORS[CG_N_STEP_FACTORS - 1]; /* the coarsest steps that blocks may have */
    const size_t channels = cg_geometry_channels(&p->geometry);
    for (uint32_t i = 0; i < group->n_slices; i++) {
        const cg_slice slice = cg_group_slice(group, matrix, i);
        const float *mean = cg_profile_row(p, p->mean, slice);
        const float *weight = cg_profile_row(p, p->weight, slice);
        const float *anchor_step =
            p->anchor_step != NULL ? cg_profile_row(p, p->anchor_step, slice) : NULL;
        for (size_t ch = 0; ch < channels; ch++) {
            const double anchor = anchor_step != NULL ? CG_MOST_SYMBOL * anchor_step[ch] : 0;
            for (unsigned level = 0; level < CG_N_LOSSY; level++) {
                const float step = p->step[level][slice.plane] / weight[ch];
                if (!(fabs(mean[ch]) + anchor + most_sum * step <= CG_MOST_ELEMENT))
                    return false;
            }
        }
    }
    return true;
}
