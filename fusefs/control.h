/* fusefs/control.h - the virtual directory <mount>/.cachegenfs with the files version, config and
 * metrics.
 *
 * Each has a number (cg_control_file). A node with such a number is a virtual file, and not one of
 * the store.
 * Threads: a cg_control is read-only once made.
 */
#ifndef CG_FUSEFS_CONTROL_H
#define CG_FUSEFS_CONTROL_H
#include "fusefs/metrics.h"
#include "iouring/layout.h"
#include <sys/stat.h>

#define CG_CONTROL_DIRECTORY CG_LAYOUT_MOUNT

typedef enum cg_control_file {
    CG_CONTROL_NONE = 0,
    CG_CONTROL_DIR = 1,
    CG_CONTROL_VERSION = 2,
    CG_CONTROL_CONFIG = 3,
    CG_CONTROL_METRICS = 4,
    CG_N_CONTROLS = 5,
} cg_control_file;

typedef struct cg_control {
    char *config_text;
    struct stat attr; /* owner and times */
} cg_control;

/* 0 or ENOMEM. config_text is what the file config says; it is copied, and may be NULL. */
int cg_control_init(cg_control *control, const char *config_text);
void cg_control_destroy(cg_control *control);
const char *cg_control_name(int file);
/* CG_CONTROL_NONE: there is no such file in the directory. */
int cg_control_find(const char *name);
mode_t cg_control_mode(int file);
void cg_control_attr(const cg_control *control, int file, struct stat *attr_out);
/* The file's text as of now, allocated with malloc(); the caller frees it. NULL without memory. */
char *cg_control_text(const cg_control *control, int file, const cg_metrics *metrics);
#endif
