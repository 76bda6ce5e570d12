/* Runs a job: the ranks agree, then data moves, and then, at check level full, the results are
 * compared. */
#include <string.h>

#include "hd_base.h"
#include "hd_block.h"
#include "hd_carry.h"
#include "hd_check.h"
#include "hd_comm.h"
#include "hd_data.h"
#include "hd_direct.h"
#include "hd_exec.h"
#include "hd_float_mode.h"
#include "hd_hang.h"
#include "hd_job.h"
#include "hd_moves.h"
#include "hd_nan.h"
#include "hd_order.h"
#include "hd_pairs.h"
#include "hd_poller.h"
#include "hd_recorder.h"
#include "hd_reductions.h"
#include "hd_report.h"
#include "hd_ring.h"
#include "hd_slots.h"
#include "hd_status.h"
#include "hd_stopped.h"
#include "hd_threads.h"
#include "hd_types.h"
#include "hd_unsent.h"
#include "hd_watchdog.h"

/* Whether this thread has to poll. The ranks agree on the answer: a blocking call does not match a
 * nonblocking one. Unchecked, they cannot agree, and block. */
static int must_poll(const hd_comm *c, const hd_job *j)
{
    if (!c->check || c->on_device || hd_session_serialized(c->session) ||
        hd_session_spin(c->session, !j->inline_))
        return 0;
#ifdef OPEN_MPI
    /* This library's blocking calls yield when told to: see init_mpi. Only a long all_reduce
     * between nodes can do better. */
    return hd_ring_qualifies(c, j) && !j->inline_;
#else
    return 1;
#endif
}

static int barrier(hd_comm *c, hd_job *j)
{
    MPI_Request req;
    int rc;
    hd_mpi_lock(c->session);
    rc = MPI_Ibarrier(c->mpi, &req);
    hd_mpi_unlock(c->session);
    if (hd_mpi_failed(j, rc, "MPI_Ibarrier"))
        return j->code;
    return hd_poll(c, j, &req);
}

static int data(hd_comm *c, hd_job *j)
{
    int takes = j->direct ? hd_direct_takes(c, j) : 0;
    if (takes)
        return takes < 0 ? j->code : hd_direct(c, j);
    takes = hd_slots_takes(c, j);
    if (takes)
        return takes < 0 ? j->code : hd_slots(c, j);
    switch (j->kind) {
    /* The check was the barrier. */
    case HD_BARRIER:
        if (j->new_block)
            return hd_block_take(c, j);
        return c->check || j->monitored || c->size == 1 ? HD_OK : barrier(c, j);
    case HD_ALL_REDUCE: return hd_all_reduce(c, j);
    case HD_REDUCE: return hd_reduce(c, j);
    case HD_REDUCE_SCATTER: return hd_reduce_scatter(c, j);
    case HD_BROADCAST: return c->size > 1 ? hd_broadcast(c, j) : HD_OK;
    case HD_ALL_GATHER: return hd_all_gather(c, j);
    case HD_GATHER: return hd_gather(c, j);
    case HD_SCATTER: return hd_scatter(c, j);
    case HD_ALL_TO_ALL: return hd_all_to_all(c, j);
    }
    hd_fail(j, HD_ERR_BACKEND, "unknown operation %d", j->kind);
    return j->code;
}

static uint64_t fingerprint(const hd_job *j)
{
    union {
        double d;
        uint64_t u;
    } factor = {j->factor};
    uint64_t h = hd_mix(j->api_hash, ((uint64_t)j->all_async << 56) | ((uint64_t)j->kind << 48) |
                                         ((uint64_t)(uint8_t)j->dtype << 40) |
                                         ((uint64_t)(uint8_t)j->redop << 32) | (uint32_t)j->root);
    h = hd_mix(h, j->layout);
    if (j->extra)
        h = hd_mix(h, (uint64_t)j->extra);
    if (j->redop == HD_PREMUL_SUM)
        h = hd_mix(h, factor.u);
    if (j->checked.carry && j->checked.carry->small)
        h = hd_mix(h, (uint64_t)j->count);
    return h;
}

/* A sum of several NaNs is a NaN, but which one depends on the order: returns eight bytes with all
 * their NaNs made equal. */
static uint64_t nans_alike(uint64_t word, int dtype)
{
    const int width = dtype == HD_FLOAT16 || dtype == HD_BFLOAT16    ? 16
                      : dtype == HD_FLOAT32 || dtype == HD_COMPLEX64 ? 32
                                                                     : 64;
    const uint64_t infinity = dtype == HD_FLOAT16    ? 0x7c00
                              : dtype == HD_BFLOAT16 ? 0x7f80
                              : width == 32          ? 0x7f800000
                                                     : 0x7ff0000000000000;
    const uint64_t unsigned_bits = ~(uint64_t)0 >> (65 - width);
    for (int at = 0; at < 64; at += width)
        if ((word >> at & unsigned_bits) > infinity)
            word |= unsigned_bits << at | (uint64_t)1 << (at + width - 1);
    return word;
}

/* Level full: after the operation, also compares the results that must be the same on all ranks. 1:
 * the others go on. */
static int check_result(hd_comm *c, hd_job *j)
{
    const int floats =
        j->kind == HD_ALL_REDUCE && j->dtype >= HD_FLOAT16 && j->dtype <= HD_COMPLEX128;
    uint64_t h = 1;
    if (j->kind != HD_ALL_REDUCE && j->kind != HD_BROADCAST && j->kind != HD_ALL_GATHER)
        return 1;
    j->checked.compares = 1;
    /* The others compare, and must not wait for this rank. */
    if (j->code != HD_OK && j->code != HD_ERR_INTERRUPT) {
        j->refusal.why = "the operation failed there";
        j->refusal.code = j->code;
        hd_check(c, j, 0);
        return 0;
    }
    for (int i = 0; i < j->nout; i++) {
        const int64_t bytes = j->out[i].n * (int64_t)hd_itemsize(j->dtype);
        const char *p = j->out[i].ptr;
        uint64_t word = 0;
        int64_t at = 0;
        for (; at + 8 <= bytes; at += 8) {
            memcpy(&word, p + at, 8);
            h = hd_mix(h, floats ? nans_alike(word, j->dtype) : word);
        }
        word = 0;
        if (at < bytes) /* an empty tensor may have no address */
            memcpy(&word, p + at, (size_t)(bytes - at));
        h = hd_mix(h, floats ? nans_alike(word, j->dtype) : word);
    }
    j->checked.checksum = h | 1;
    j->checked.carry = NULL; /* this check carries nothing */
    /* The ranks may have met just before the deadline: it has time of its own, as the data had. */
    j->begun = hd_job_begun_again(j, hd_now());
    return hd_check(c, j, hd_mix(fingerprint(j), j->checked.checksum)) == HD_OK;
}

/* Before the ranks agree, so that they learn of it if this one has no memory. Within a node calls
 * go through the memory of the group, which needs none. */
static void reserve(hd_comm *c, hd_job *j)
{
    const int64_t reduced = c->page && !hd_ordered(c, j) ? 0 : hd_reductions_stage(c, j);
    const int64_t moved = c->page ? 0 : hd_moves_stage(c, j);
    if (reduced + moved == 0 || hd_stage(c, j, reduced + moved))
        return;
    j->refusal.why = "no memory for a staging buffer";
    j->refusal.code = HD_ERR_BACKEND;
}

/* Tells the others why this rank cannot make the call. */
static void refuse(hd_comm *c, hd_job *j)
{
    j->checked.carry = NULL;
    if (c->size > 1 && c->check && !(j->refusal.if_agreed && c->agreed != j->refusal.after))
        hd_check(c, j, 0);
}

/* Moves the data. 0: the others do not go on to compare the results. */
static int move(hd_comm *c, hd_job *j)
{
    int unmatched;
    hd_data_begin(c, j);
    hd_rec_agreed(j);
    unmatched =
        c->size > 1 && c->check && j->uneven && !j->checked.verified && hd_verify_pairs(c, j);
    if (!unmatched)
        data(c, j);
    hd_data_end(c);
    if (j->code == HD_ERR_TIMEOUT && j->text) /* not before: the watchdog would not wait */
        hd_hang_report(c->session, j->text, 0);
    return !unmatched;
}

void hd_exec(hd_comm *c, hd_job *j)
{
    /* Sums must not depend on which thread of which rank adds: see hd_float_mode.h. */
    const hd_float_mode mode = j->redop >= 0 ? hd_float_mode_plain() : 0;
    hd_nan nan = {.of = 0};
    hd_carry carry;

    hd_unsent_take(c->post);
    hd_session_enter(c->session, j);
    hd_rec_start(j);
    if (hd_session_broken(c->session)) {
        hd_fail_broken(c, j);
        goto out;
    }
    /* Here, not where it was submitted: an operation before this one may make its input. */
    if (hd_nan_wanted && !j->refusal.why && hd_nan_find(j, &nan) && (c->check || c->size == 1))
        hd_nan_refuse(c, j, &nan);
    if (!j->refusal.why) {
        j->checked.carry = hd_carries(c, j, &carry) ? &carry : NULL;
        if (c->size > 1 && c->check && !j->checked.carry)
            reserve(c, j);
    }
    if (j->refusal.why) {
        refuse(c, j);
        goto out;
    }
    j->polls = must_poll(c, j);
    j->direct = hd_direct_finds(c, j);
    if (c->size > 1 && (c->check || j->checked.carry || j->monitored || j->closing) &&
        hd_check(c, j, fingerprint(j)))
        goto out;
    if (j->checked.carried) {
        hd_count(&c->carried);
        if (!c->page)
            hd_rec_agreed(j);
    } else if (!move(c, j)) {
        goto out;
    }
    if (c->check == HD_CHECK_FULL && c->size > 1 && !c->on_device && !check_result(c, j))
        goto out;
    __atomic_store_n(&c->agreed, j->seq, __ATOMIC_RELAXED);
    if (nan.of && j->code == HD_OK)
        hd_nan_fail_after(c, j, &nan);
out:
    j->checked.carry = NULL;
    if (j->code || j->refusal.why)
        hd_poller_sends(c); /* a rank that waits for this one's vote may be stopped */
    if (j->code == HD_ERR_TIMEOUT)
        hd_stopped_explain(c, j);
    hd_rec_end(j);
    hd_session_leave(c->session);
    if (mode)
        hd_float_mode_restore(mode);
}
