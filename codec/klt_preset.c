/* What preset klt is made of. */
#include "codec/klt.h"

#include "codec/analysis.h"
#include "codec/profile_bases.h"

static cg_status read_profile(cg_cursor *in, cg_profile *p)
{
    const cg_status status = cg_profile_read_bases(in, p);
    return status == CG_OK ? cg_analyses_new(cg_profile_n_bases(p), &p->analyses) : status;
}

const cg_preset cg_klt_preset = {
    .transforms = CG_KLT_TRANSFORMS,
    .start_multiple = CG_DCT, /* blocks are counted from position 0 of the context */
    .has_bases = true,
    .read_profile = read_profile,
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
