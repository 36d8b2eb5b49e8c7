/* connector/writer.h - the thread that encodes and publishes saves, in the order they came.
 * Threads: one for each runtime.
 */
#ifndef CG_CONNECTOR_WRITER_H
#define CG_CONNECTOR_WRITER_H

/* The thread's body; the argument is the cg_runtime. */
void *cg_save_writer(void *runtime);
#endif
