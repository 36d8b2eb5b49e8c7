/* The table of presets, by the token transform of the profile. */
#include "codec/lossy.h"

#include "codec/klt.h"
#include "codec/paper.h"

/* A NULL is never called: only profiles of preset klt have a joint matrix. */
static const cg_preset klt_preset = {
    .given_bytes = cg_klt_given_bytes,
    .decode_joint_scratch_bytes = cg_klt_decode_joint_scratch_bytes,
    .decode_joint = cg_klt_decode_joint,
    .decode_scratch_bytes = cg_klt_decode_scratch_bytes,
    .decode = cg_klt_decode,
    .encode_scratch_bytes = cg_klt_encode_scratch_bytes,
    .encode = cg_klt_encode,
    .shared_bytes = cg_klt_shared_bytes,
    .encode_joint = cg_klt_encode_joint,
    .transcode = cg_klt_transcode,
};

static const cg_preset *const presets[] = {
    [CG_TOKENS_DCT] = &klt_preset,
    [CG_TOKENS_ANCHORS] = &cg_paper_preset,
};

const cg_preset *cg_lossy_preset(const cg_profile *profile)
{
    return presets[profile->token_transform]; /* cg_profile_open() takes no other number */
}
