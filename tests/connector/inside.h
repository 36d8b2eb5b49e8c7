/* tests/connector/inside.h - what a test makes happen inside a connector. */
#ifndef CG_TESTS_CONNECTOR_INSIDE_H
#define CG_TESTS_CONNECTOR_INSIDE_H
#include "connector/asking.h"
#include "connector/cachegen.h"

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A load has n_bytes under way, for ever. */
void cg_test_bytes_begin(cachegen *connector, uint64_t n_bytes);
/* A load has brought n_bytes over the link, just now. */
void cg_test_bytes_came(cachegen *connector, uint64_t n_bytes);

/* How many chunks all loads of this process have verified. */
int cg_test_n_verified(void);

/* Two look-ups of one prompt, the first of which has so much patience, the second so much. NULL
 * without memory. */
typedef struct cg_test_asking cg_test_asking;
cg_test_asking *cg_test_asking_new(cachegen *connector, const cachegen_request *request,
                                   uint64_t patience_ns, uint64_t other_ns);
/* cg_asking_ask() for those that are not done. keeps_queue: also where the cg_io is to be freed. */
cg_asked cg_test_asking_ask(cg_test_asking *asking, uint64_t silence_ns, bool keeps_queue);
/* How many chunks were found; -1: it is not done. */
int cg_test_asking_found(const cg_test_asking *asking, int which);
void cg_test_asking_free(cg_test_asking *asking);

#ifdef __cplusplus
}
#endif
#endif
