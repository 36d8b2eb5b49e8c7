#include "fusefs/persona.h"

#include <linux/capability.h>
#include <linux/securebits.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/fsuid.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

static _Thread_local enum { UNKNOWN, ABLE, UNABLE } ability;
static _Thread_local bool is_other;

/* Without this bit, a change of the id takes CAP_DAC_OVERRIDE away, and the staging directory is
 * root's. */
static bool keep_capabilities(void)
{
    const int bits = geteuid() == 0 ? prctl(PR_GET_SECUREBITS) : -1;
    return bits >= 0 && ((bits & SECBIT_NO_SETUID_FIXUP) != 0 ||
                         prctl(PR_SET_SECUREBITS, bits | SECBIT_NO_SETUID_FIXUP) == 0);
}

void cg_persona_enter(uid_t uid, gid_t gid)
{
    if (ability == UNKNOWN)
        ability = keep_capabilities() ? ABLE : UNABLE;
    if (ability != ABLE || uid == (uid_t)-1 || gid == (gid_t)-1)
        return;
    setfsgid(gid);
    setfsuid(uid);
    is_other = true;
}

void cg_persona_leave(void)
{
    if (!is_other)
        return;
    setfsuid(geteuid());
    setfsgid(getegid());
    is_other = false;
}

void cg_persona_drop_capabilities(void)
{
    static const uint64_t needed = UINT64_C(1) << CAP_CHOWN | UINT64_C(1) << CAP_DAC_OVERRIDE |
                                   UINT64_C(1) << CAP_DAC_READ_SEARCH | UINT64_C(1) << CAP_FOWNER |
                                   UINT64_C(1) << CAP_FSETID | UINT64_C(1) << CAP_MKNOD |
                                   UINT64_C(1) << CAP_SETUID | UINT64_C(1) << CAP_SETGID |
                                   UINT64_C(1) << CAP_SYS_ADMIN | UINT64_C(1) << CAP_SETPCAP |
                                   UINT64_C(1) << CAP_SETFCAP | UINT64_C(1) << CAP_LEASE;
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct sets[2];
    if (syscall(SYS_capget, &header, sets) != 0)
        return;
    for (int i = 0; i < 2; i++) {
        const uint32_t keep = (uint32_t)(needed >> (32 * i));
        sets[i].permitted &= keep;
        sets[i].effective &= keep;
        sets[i].inheritable = 0;
    }
    syscall(SYS_capset, &header, sets);
}
