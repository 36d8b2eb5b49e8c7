/* The table of presets, by the token transform of the profile. */
#include "codec/lossy.h"

#include "codec/klt.h"
#include "codec/paper.h"

/* A NULL is never called: only profiles of preset klt have a joint matrix. */
static const cg_preset presets[] = {
    [CG_TOKENS_DCT] = {cg_klt_given_bytes, cg_klt_decode_joint_scratch_bytes, cg_klt_decode_joint,
                       cg_klt_decode_scratch_bytes, cg_klt_decode, cg_klt_encode_scratch_bytes,
                       cg_klt_encode, cg_klt_shared_bytes, cg_klt_encode_joint, cg_klt_transcode},
    [CG_TOKENS_ANCHORS] = {NULL, NULL, NULL, cg_paper_decode_scratch_bytes, cg_paper_decode,
                           cg_paper_encode_scratch_bytes, cg_paper_encode, NULL, NULL,
                           cg_paper_transcode},
};

const cg_preset *cg_lossy_preset(const cg_profile *profile)
{
    return &presets[profile->token_transform]; /* cg_profile_open() takes no other number */
}
