/* fusefs/survey.h - what takes the space of a store: the files of its objects, and all others as a
 * sum.
 *
 * A survey walks the store by names. It reads the fixed header of each object's file, since that
 * says where its levels end and which chunk comes before. It follows no link, and passes over
 * objects that it cannot read: of those only the space counts. It also reads what the contexts
 * name.
 * Threads: each call stands alone. A cg_survey is plain data.
 */
#ifndef CG_FUSEFS_SURVEY_H
#define CG_FUSEFS_SURVEY_H
#include "iouring/tree.h"
#include <stdbool.h>
#include <stddef.h>
#include <sys/stat.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A file under objects/. It has a name for each of its levels. One that lies in two models, as
 * after `cp -al`, is there for each of them. */
typedef struct cg_object_file {
    cg_key key, parent; /* of the chunk, and of the one before it in its prompt */
    cg_fingerprint profile;
    uint32_t model; /* index in cg_survey.models */
    uint32_t first_position, n_tokens;
    uint8_t levels; /* bit n: it has the name of level n */
    uint8_t finest; /* what the file holds; not all of it need have a name */
    /* In contexts, say. At least 1 where a context names the chunk at one of these levels
     * (fusefs/marks.h), whatever the links say. */
    uint32_t n_names_elsewhere;
    ino_t ino;
    uint64_t used_bytes; /* on disk */
    uint64_t
        level_bytes[CG_N_LEVELS]; /* from the file's start to the end of a level that it holds */
    int64_t used_at_s; /* by the store's clock: when it was read or written for the last time */
    /* Of the file when it was met: what happens to it later changes one of them. */
    int64_t accessed_ns, modified_ns, changed_ns;
    uint32_t n_links;
} cg_object_file;

typedef struct cg_survey {
    cg_object_file *files;
    size_t n_files;
    char **models; /* names of all folders in the root */
    /* On disk. A file with names in several models counts for one: of those in which it is an
     * object's, or of all if it is none, for the one that was walked first. */
    uint64_t *model_bytes;
    size_t n_models;
    uint64_t used_bytes; /* on disk, of all files and folders; with several names: once */
    /* A file of a context was leased, or a context is not ours to read, or contexts name too many
     * chunks: all objects of its model count as named. */
    bool has_unknown;
    bool has_forbidden;  /* the second, which no later survey will change */
    bool has_leased;     /* the first */
    char *forbidden;     /* the path of the first such context; NULL: none, or no memory for it */
    const char *crowded; /* of models: one of the third kind; NULL: none */
} cg_survey;

/* Makes a survey; the caller frees it with cg_survey_free(). is_over (may be NULL) is asked now and
 * then; true ends the survey with CG_ERR_CANCELLED. CG_ERR_NO_MEMORY. CG_ERR_...: the root, a
 * folder of contexts, a context.json or a context's chunk cannot be read. After an error
 * *survey_out is empty. It takes about 200 bytes of memory for each file of an object, and 24 for
 * each other name of a file with several and for each chunk that a context.json names; of the
 * latter 400 MB at most. */
cg_status cg_survey_make(int root_fd, bool (*is_over)(void *user), void *user,
                         cg_survey *survey_out);
void cg_survey_free(cg_survey *survey); /* zeros are fine */
/* Whether attr is the file's, and it was neither used nor changed since it was met. */
bool cg_survey_is_as_it_was(const cg_object_file *file, const struct stat *attr);
/* The same, but it may have been read, and got or lost names. */
bool cg_survey_is_same_content(const cg_object_file *file, const struct stat *attr);

#ifdef __cplusplus
}
#endif
#endif
