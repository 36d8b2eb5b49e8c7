/* iouring/thread_signals.h - which signals the library's own threads take.
 *
 * Signals are the host's. Its handlers must not run on a thread of ours, whose stack and locks they
 * don't expect, so all that another process or timer sends is blocked there. What the thread itself
 * causes (SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS) stays unblocked: blocked, it would end
 * the process without the handler that was to report it (Python's faulthandler, a JVM's).
 * Threads: any.
 */
#ifndef CG_IOURING_THREAD_SIGNALS_H
#define CG_IOURING_THREAD_SIGNALS_H
#include <signal.h>

#ifdef __cplusplus
extern "C" {
#endif

/* For the calling thread, around pthread_create(), which hands the mask down. */
void cg_thread_signals_block(sigset_t *before_out);
void cg_thread_signals_restore(const sigset_t *before);

#ifdef __cplusplus
}
#endif
#endif
