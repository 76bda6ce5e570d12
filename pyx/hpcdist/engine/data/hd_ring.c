/* all_reduce of a long tensor as a ring of messages, polled with naps: between nodes, on a lane
 * without a core to spare. There the blocking call of Open MPI yields, which each time costs a
 * time slice of the thread that computes; its nonblocking call passes whole tensors on, half as
 * fast; and MPICH's takes more of the core.
 *
 * The tensor has a block for each rank. In the first size-1 steps a block goes around and every
 * rank adds its own; in the last size-1 steps the results go around. A block travels in segments,
 * and a segment goes on as soon as it has arrived, so steps overlap. Each block is combined once,
 * in the order of the ring: all ranks get the same bits. */
#include <stdlib.h>

#include "hd_base.h"
#include "hd_comm.h"
#include "hd_data.h"
#include "hd_job.h"
#include "hd_kernels.h"
#include "hd_ring.h"
#include "hd_types.h"

#define TAG_RING 31 /* user tags never end in 31: see hd_p2p.c */
/* Bytes. Open MPI sends up to 64 KiB over TCP, its header included, without asking first: a segment
 * of exactly that size took three more messages, and half as much of the core again. */
#define SEGMENT (60 << 10)
#define LEAST (1 << 20)  /* bytes: shorter tensors are left to the library */
#define BLOCK (32 << 10) /* bytes: so are tensors that many ranks divide into shorter blocks */
#define WINDOW 32        /* segments in flight each way: what the link moves in a few naps */

typedef struct ring {
    hd_comm *c;
    char *data, *temp;
    int64_t n, item, per,
        segments;  /* elements; bytes of one; elements of a block; segments of a block */
    int64_t steps; /* of segments, in total */
    int64_t sent, sends_done, posted, received;
    MPI_Request send[WINDOW], recv[WINDOW];
} ring;

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Segment q % segments of a block: its place and bytes, which may be 0 at the end of the tensor. */
static char *place(const ring *r, int64_t block, int64_t q, int64_t *bytes)
{
    const int64_t step = SEGMENT / r->item, end = least(r->n, (block + 1) * r->per);
    const int64_t at = least(end, block * r->per + q % r->segments * step);
    *bytes = least(step, end - at) * r->item;
    return r->data + at * r->item;
}

/* The block to send in the step of q; the block to receive in that step is the one before it. */
static int64_t outgoing(const ring *r, int64_t q)
{
    const int64_t size = r->c->size, step = q / r->segments;
    return ((r->c->rank - step) % size + size) % size;
}

static int64_t incoming(const ring *r, int64_t q)
{
    return (outgoing(r, q) + r->c->size - 1) % r->c->size;
}

static int reducing(const ring *r, int64_t q) { return q / r->segments < r->c->size - 1; }

/* Posts all the messages that may be posted. */
static int post(ring *r)
{
    const int next = (r->c->rank + 1) % r->c->size,
              before = (r->c->rank + r->c->size - 1) % r->c->size;
    int64_t bytes;
    int rc = MPI_SUCCESS;
    while (!rc && r->posted < r->steps && r->posted < r->received + WINDOW) {
        const int64_t q = r->posted;
        char *p = place(r, incoming(r, q), q, &bytes);
        if (reducing(r, q))
            p = r->temp + q % WINDOW * SEGMENT;
        /* What a result overwrites was sent `size` steps before. */
        else if (r->sends_done <= q - (r->c->size - 1) * r->segments)
            break;
        rc = MPI_Irecv(p, (int)bytes, MPI_BYTE, before, TAG_RING, r->c->mpi, &r->recv[q % WINDOW]);
        r->posted++;
    }
    while (!rc && r->sent < r->steps && r->sent < r->sends_done + WINDOW &&
           (r->sent < r->segments || r->sent < r->received + r->segments)) {
        const char *p = place(r, outgoing(r, r->sent), r->sent, &bytes);
        rc = MPI_Isend(p, (int)bytes, MPI_BYTE, next, TAG_RING, r->c->mpi,
                       &r->send[r->sent % WINDOW]);
        r->sent++;
    }
    return rc;
}

int64_t hd_ring_stage(void) { return (int64_t)WINDOW * SEGMENT; }

int hd_ring_qualifies(const hd_comm *c, const hd_job *j)
{
    int64_t elements = 0; /* then bytes */
    if (j->kind != HD_ALL_REDUCE || c->size == 1 || c->page || c->on_device)
        return 0;
    for (int i = 0; i < j->nout; i++)
        elements += j->out[i].n;
    elements *= (int64_t)hd_itemsize(j->dtype);
    return elements >= LEAST && elements >= (int64_t)BLOCK * c->size;
}

int hd_ring_all_reduce(hd_comm *c, hd_job *j, char *data, int64_t n)
{
    ring r = {.c = c, .data = data, .n = n, .item = (int64_t)hd_itemsize(j->dtype)};
    const hd_reduce_fn reduce = hd_reduce_kernel(j->redop, j->dtype);
    int rc = MPI_SUCCESS;
    hd_nap nap = {0};

    r.per = (n + c->size - 1) / c->size;
    r.segments = (r.per + SEGMENT / r.item - 1) / (SEGMENT / r.item);
    r.steps = 2 * (c->size - 1) * r.segments;
    r.temp = hd_stage(c, j, hd_ring_stage());
    if (!r.temp)
        return j->code;
    while (!rc && (r.received < r.steps || r.sends_done < r.steps)) {
        int moved = 0, done;
        rc = post(&r);
        while (!rc && r.received < r.posted) {
            const int64_t q = r.received;
            rc = MPI_Test(&r.recv[q % WINDOW], &done, MPI_STATUS_IGNORE);
            if (rc || !done)
                break;
            if (reducing(&r, q)) {
                int64_t bytes;
                char *p = place(&r, incoming(&r, q), q, &bytes);
                reduce(r.temp + q % WINDOW * SEGMENT, p, p, bytes / r.item);
            }
            r.received++;
            moved = 1;
        }
        while (!rc && r.sends_done < r.sent) {
            rc = MPI_Test(&r.send[r.sends_done % WINDOW], &done, MPI_STATUS_IGNORE);
            if (rc || !done)
                break;
            r.sends_done++;
            moved = 1;
        }
        if (!moved)
            hd_nap_step(&nap);
    }
    return hd_mpi_failed(j, rc, "MPI_Isend/Irecv/Test") ? j->code : HD_OK;
}
