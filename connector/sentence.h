/* connector/sentence.h - the one sentence that says why a connector did not open.
 *
 * The caller of cachegen_open() gives room for it, or none. Whoever refuses something writes the
 * sentence there; the last writer wins.
 * Threads: that of the caller.
 */
#ifndef CG_CONNECTOR_SENTENCE_H
#define CG_CONNECTOR_SENTENCE_H
#include "codec/status.h"
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Where the sentence goes: text[bytes]. text NULL or bytes 0: nowhere. */
typedef struct cg_sentence {
    char *text;
    size_t bytes;
} cg_sentence;

/* Writes a sentence, cut to what fits, and returns status. So it can be the value of a return. */
__attribute__((format(printf, 3, 4))) cg_status
cg_sentence_say(const cg_sentence *error, cg_status status, const char *format, ...);

#ifdef __cplusplus
}
#endif
#endif
