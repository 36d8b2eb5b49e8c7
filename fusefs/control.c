#include "fusefs/control.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#ifndef CG_VERSION
#define CG_VERSION "unknown"
#endif

/* Inode numbers that file systems don't hand out. */
static const ino_t FIRST_INO = 0xcac4e000u;

static const char *const NAMES[CG_N_CONTROLS] = {"", CG_CONTROL_DIRECTORY, "version", "config",
                                                 "metrics"};

int cg_control_init(cg_control *control, const char *config_text)
{
    memset(control, 0, sizeof *control);
    control->config_text = strdup(config_text == NULL ? "" : config_text);
    control->attr.st_uid = geteuid();
    control->attr.st_gid = getegid();
    clock_gettime(CLOCK_REALTIME, &control->attr.st_mtim);
    return control->config_text == NULL ? ENOMEM : 0;
}

void cg_control_destroy(cg_control *control)
{
    free(control->config_text);
}

const char *cg_control_name(int file)
{
    return NAMES[file];
}

int cg_control_find(const char *name)
{
    for (int file = CG_CONTROL_VERSION; file < CG_N_CONTROLS; file++)
        if (strcmp(name, NAMES[file]) == 0)
            return file;
    return CG_CONTROL_NONE;
}

mode_t cg_control_mode(int file)
{
    return file == CG_CONTROL_DIR ? S_IFDIR | 0555 : S_IFREG | 0444;
}

void cg_control_attr(const cg_control *control, int file, struct stat *attr_out)
{
    *attr_out = control->attr;
    attr_out->st_atim = attr_out->st_ctim = attr_out->st_mtim;
    attr_out->st_ino = FIRST_INO + (ino_t)file;
    attr_out->st_mode = cg_control_mode(file);
    attr_out->st_nlink = file == CG_CONTROL_DIR ? 2 : 1;
    attr_out->st_blksize = 4096;
}

/* The process is asked for now: a daemon goes to the background after its start. */
static char *config_now(const cg_control *control)
{
    char *text;
    return asprintf(&text, "%spid = %d\n", control->config_text, (int)getpid()) < 0 ? NULL : text;
}

char *cg_control_text(const cg_control *control, int file, const cg_metrics *metrics)
{
    switch (file) {
    case CG_CONTROL_VERSION: return strdup("cachegenfs " CG_VERSION "\n");
    case CG_CONTROL_CONFIG: return config_now(control);
    default: return cg_metrics_text(metrics);
    }
}
