/* cuda/device_state.h - what a cg_device is made of (codec/device.h). Internal to cuda.
 *
 * Two pieces of memory, one on the GPU and one pinned, are taken when a device is opened, and cut
 * into the parts of slots (work on one chunk), batches (slots' chunks that are decoded together),
 * copies (chunks read out of blocks) and projectors (codec/projection.h).
 *
 * A thread prepares its slot's chunk and uploads it. Then it takes a free batch, its own chunk and
 * others that wait for one into it, and waits for the GPU; or it waits until another thread has
 * done so with its chunk. So chunks come together while the GPU is busy, and a chunk that comes
 * alone does not wait for others.
 *
 * Errors: a call of CUDA that fails ends the function with cg_device_error(), which waits until
 * nothing of the stream is under way. If even that fails the error is one that stays (an illegal
 * address, a lost GPU): then the device is broken for good. CUDA keeps the last error of a thread
 * until somebody asks for it. So this is done after a call of ours that failed, and never after
 * one that did not: on an engine's thread that would take an error that is the engine's.
 * Threads: any; the lock guards what stands behind it.
 */
#ifndef CG_CUDA_DEVICE_STATE_H
#define CG_CUDA_DEVICE_STATE_H
#include "codec/device.h"
#include "cuda/calls.h"

#include <pthread.h>
#include <stdatomic.h>

enum {
    CG_DEVICE_MAX_BLOCKS = 64,
    CG_DEVICE_REASON_BYTES = 256,
    /* Several, so that one decodes streams, which leave most of a GPU idle, while others multiply.
     * With those that read, upload and project these are seven streams. A process has eight queues
     * for all of its streams, the engine's too: where two share one, they wait for each other. */
    CG_DEVICE_BATCHES = 4,
};

typedef struct cg_device_slot {
    cg_cuda_event uploaded;
    /* Pinned: what a call uploads, and the caller's part. */
    int64_t *table;  /* [table_entries], the plan right behind it */
    uint8_t *plan;   /* [plan_bytes] */
    uint8_t *memory; /* [memory_bytes] */
    /* On the GPU. */
    uint8_t *table_dev, *plan_dev, *chunk_dev, *scratch_dev;
} cg_device_slot;

/* A slot's chunk that is to be decoded. Its thread waits until another, or itself, has done it. */
typedef struct cg_device_job {
    cg_cuda_event uploaded;
    cg_cuda_plan plan;
    cg_cuda_decode_params params; /* but for status_dev */
    const cg_device_mark *mark;   /* NULL: nothing to wait for */
    /* Under the device's lock. */
    struct cg_device_job *next; /* of those that wait, or of the same batch */
    bool is_waiting, is_done;
    cg_status status;
} cg_device_job;

typedef struct cg_device_batch {
    cg_cuda_stream stream;
    cg_cuda_event done;
    uint32_t *status;    /* pinned: [CG_CUDA_MAX_JOBS] */
    uint8_t *status_dev; /* the same */
    bool is_taken;       /* under the device's lock */
} cg_device_batch;

typedef enum cg_device_copy_state {
    CG_COPY_FREE = 0,
    CG_COPY_TAKEN,
    CG_COPY_DONE,     /* taken, and known to be there */
    CG_COPY_RELEASED, /* its copy may still be under way: free when its event is past */
} cg_device_copy_state;

typedef struct cg_device_copy {
    cg_device_copy_state state; /* under the device's lock */
    cg_cuda_event done;
    int64_t *table;    /* pinned */
    uint8_t *elements; /* pinned */
} cg_device_copy;

typedef struct cg_device_projector {
    cg_projector base; /* its memory is pinned */
    cg_device *device;
    atomic_bool
        is_taken; /* not under the lock: encoders take it, which run at the lowest priority */
    cg_cuda_event done;
    uint8_t *made;         /* pinned: laid out as cg_cuda_made says */
    cg_cuda_place *places; /* pinned */
    uint8_t *coded;        /* pinned: kernels write it */
    float *rows_dev, *coefs_dev;
    uint8_t *made_dev, *elements_dev, *places_dev, *coding_dev;
} cg_device_projector;

struct cg_device_mark {
    cg_cuda_event event;
    bool is_ours;         /* kept with the mark for a later one; otherwise it is the engine's */
    cg_device_mark *next; /* in the list of free ones */
};

struct cg_device {
    const cg_cuda_calls *calls;
    cg_device_config config;
    cg_cuda_profile *profile; /* NULL: only L0 */
    void *blob_dev, *bases_dev;
    size_t memory_bytes, plan_bytes, scratch_bytes, raw_bytes;
    uint32_t table_entries; /* block ids that a chunk needs at most */
    void *pinned, *memory_dev;
    /* project_stream: of all projectors, since encoders take longer for what is left to them.
     * Their tasks' calls may alternate there: no two tasks share memory. */
    cg_cuda_stream read_stream, upload_stream, project_stream;
    cg_device_batch batches[CG_DEVICE_BATCHES];
    cg_device_slot *slots;  /* [config.n_slots] */
    cg_device_copy *copies; /* [config.n_copies] */
    cg_device_projector *projectors;
    uint32_t n_projectors;
    cg_cuda_projection_most projector_most; /* of one */
    size_t coding_bytes, coded_bytes;       /* of one: scratch on the GPU, and pinned */

    pthread_mutex_t lock;   /* of what follows; not held while CUDA waits for anything */
    pthread_cond_t changed; /* a batch has ended */
    cg_device_job *waiting; /* for a batch: in the order in which they came */
    cg_device_mark *free_marks;
    cg_cuda_blocks blocks[CG_DEVICE_MAX_BLOCKS]; /* filled from the front, then constant */
    _Atomic uint32_t n_blocks;
    char reason[CG_DEVICE_REASON_BYTES]; /* written once, before is_broken */
    _Atomic bool is_broken;
};

/* On a thread of the engine's: makes the device the thread's current one; before_out is for
 * cg_device_leave(). CG_ERR_DEVICE. */
cg_status cg_device_enter(cg_device *device, int *before_out);
void cg_device_leave(cg_device *device, int before);
/* On a thread of the connector's own: makes the device the thread's current one, which it stays.
 * Nothing is restored: a new thread's is device 0, and making that current again, as any call of
 * CUDA with it current, would take hundreds of MiB there for a context. CG_ERR_DEVICE. */
cg_status cg_device_use(cg_device *device);
/* On such a thread, once: an engine may capture a graph meanwhile, which calls of other threads
 * would make invalid (cg_device_use() does so). */
void cg_device_relax(cg_device *device);
/* To be called when a call of CUDA, of that name, has failed while work on stream (NULL: none) may
 * be under way. Waits until it no longer is, and returns CG_ERR_DEVICE. Where waiting fails, too,
 * the device is broken from now on. */
cg_status cg_device_error(cg_device *device, const char *call, int error, cg_cuda_stream stream);
/* Waits until nothing of the stream is under way, where something other than CUDA went wrong. */
void cg_device_settle(cg_device *device, cg_cuda_stream stream);
/* A copy between tiles in pinned memory and the run's blocks. The caller fills in its blocks. */
cg_cuda_blocks_copy cg_device_copy_of(const cg_device *device, const cg_device_run *run,
                                      const cg_device_tiles *tiles, void *memory, bool is_write);
/* The run's blocks as kernels take them, but for table_dev; and the run's part of its table, to
 * table[table_entries], which the caller gives to kernels. CG_ERR_INVALID_ARGUMENT: the table does
 * not cover the run, or there are no such blocks. */
cg_status cg_device_take_run(const cg_device *device, const cg_device_run *run, int64_t *table,
                             cg_cuda_blocks *blocks_out);

/* Decodes an uploaded chunk, with others, and returns its status. CG_ERR_DEVICE. */
cg_status cg_device_run_job(cg_device *device, cg_device_job *job);
/* Waits for a free batch, for other work after the mark; to be given back with nothing under way.
 */
cg_device_batch *cg_device_take_batch(cg_device *device, const cg_device_mark *mark);
void cg_device_return_batch(cg_device *device, cg_device_batch *batch);

/* Waits, by the event, until all that was enqueued on the stream is done. CG_ERR_DEVICE. */
cg_status cg_device_finish(cg_device *device, cg_cuda_stream stream, cg_cuda_event done);
/* What is enqueued on the stream from now on waits until the mark's point is reached; NULL: it does
 * not. CG_ERR_DEVICE. */
cg_status cg_device_await(cg_device *device, cg_cuda_stream stream, const cg_device_mark *mark);

/* The functions of codec/device.h, mark() and so on. */
cg_status cg_device_open(const cg_device_config *config, cg_device **device_out, char *reason_out,
                         size_t reason_bytes);
void cg_device_close(cg_device *device);
cg_status cg_device_mark_make(cg_device *device, cg_after after, cg_device_mark **mark_out);
void cg_device_mark_drop(cg_device *device, cg_device_mark *mark);
bool cg_device_mark_is_past(cg_device *device, const cg_device_mark *mark);
cg_status cg_device_decode(cg_device *device, uint32_t slot, size_t n_bytes,
                           const cg_device_run *run, const cg_device_mark *mark);
cg_status cg_device_write(cg_device *device, uint32_t slot, const cg_device_tiles *tiles,
                          const cg_device_run *run, const cg_device_mark *mark);
cg_status cg_device_read(cg_device *device, const cg_device_run *runs, uint32_t n_runs,
                         cg_after after, uint32_t *copies_out);
cg_status cg_device_hold(cg_device *device, uint32_t copy, cg_after after);
cg_status cg_device_read_wait(cg_device *device, uint32_t copy, void **elements_out);
void cg_device_read_release(cg_device *device, uint32_t copy);
/* What a projector does: cg_projector's project. */
cg_status cg_device_project(cg_projector *projector, const cg_projection *projection,
                            cg_projected *made_out);
cg_projector *cg_device_take_projector(cg_device *device);
void cg_device_return_projector(cg_device *device, cg_projector *projector);
#endif
