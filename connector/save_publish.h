/* connector/save_publish.h - puts into the store what a save has made: chunks, contexts, and what
 * is said of the model.
 *
 * Each asks the store, which can hang: the writer watches how long (connector/save_state.h).
 * Threads: the functions are the writer's, and want no lock held.
 */
#ifndef CG_CONNECTOR_SAVE_PUBLISH_H
#define CG_CONNECTOR_SAVE_PUBLISH_H
#include "connector/save_state.h"

/* Publishes the files of an encoded chunk, the coarsest first, which is the first to be of use. The
 * first publisher of a name wins, but not with a damaged file, nor with one that was computed on a
 * worse prefix: these are replaced. Errors of cg_encoder_finish() and cg_store_publish(). */
cg_status cg_save_publish_chunk(const cg_save_chunk *chunk, cg_io *io);
/* Publishes save->context, of the chunks that the store has by then: as far as they go without a
 * hole, and where there are none, nothing. CG_ERR_NOT_FOUND: it lacks some that the save has not
 * dropped. CG_ERR_IO: it does not say of each whether it has it; the context stays as it was. */
cg_status cg_save_publish_context(cachegen_save *save, cg_io *io);
/* Publishes the model's description, unless the store has it. */
cg_status cg_save_publish_model(const cachegen *connector, cg_io *io);
#endif
