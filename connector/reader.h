/* connector/reader.h - the thread that reads the chunks of all loads.
 * Threads: one for each runtime.
 */
#ifndef CG_CONNECTOR_READER_H
#define CG_CONNECTOR_READER_H

/* The thread's body; the argument is the cg_runtime. */
void *cg_load_reader(void *runtime);
#endif
