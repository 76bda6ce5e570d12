/* Jobs: description, errors, ownership, completion. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "hd_base.h"
#include "hd_buf.h"
#include "hd_comm.h"
#include "hd_ft.h"
#include "hd_job.h"
#include "hd_kinds.h"
#include "hd_threads.h"
#include "hd_types.h"

#define DATA_LEAST 5.0 /* seconds for the data, or the timeout if shorter */

hd_hooks hd_py;
int hd_lanes_end;

const char *hd_kind_name(int kind)
{
    static const char *const names[] = {
#define X(NAME, text) [HD_##NAME] = text,
        HD_KINDS(X)
#undef X
    };
    return kind >= 0 && kind < HD_KIND_COUNT ? names[kind] : "?";
}

void hd_job_init(hd_job *j, hd_comm *c, int kind, const char *api)
{
    memset(j, 0, offsetof(hd_job, site));
    j->site[0] = 0;
    j->kind = kind;
    j->api = api;
    j->comm = c;
    j->timeout = c->timeout;
    j->root = -1;
    j->redop = -1;
    j->dtype = -1;
    j->message.source = -1;
    j->in = &j->in1;
    j->out = &j->out1;
    j->message.req = MPI_REQUEST_NULL;
    j->message.big = MPI_DATATYPE_NULL;
    j->message.envelope_req = MPI_REQUEST_NULL;
    j->refs = 1;
}

void hd_job_clear(hd_job *j)
{
    if (j->in != &j->in1)
        free(j->in);
    if (j->out != &j->out1)
        free(j->out);
    free(j->text);
    free(j->cause);
    free(j->scratch);
    free(j->refused);
    j->in = &j->in1;
    j->out = &j->out1;
    j->text = j->cause = j->scratch = NULL;
    j->refused = NULL;
}

void hd_fail(hd_job *j, int code, const char *fmt, ...)
{
    va_list ap;
    if (j->code == HD_ERR_INTERRUPT)
        return; /* the Python exception that is already set says more */
    j->code = code;
    free(j->text);
    j->text = malloc(HD_TEXT);
    if (!j->text)
        return;
    va_start(ap, fmt);
    vsnprintf(j->text, HD_TEXT, fmt, ap);
    va_end(ap);
}

int hd_mpi_failed(hd_job *j, int rc, const char *call)
{
    char what[MPI_MAX_ERROR_STRING] = "", number[16] = "";
    char why[160];
    hd_text t;
    int len = 0, class = rc, died;
    if (rc == MPI_SUCCESS)
        return 0;
    MPI_Error_class(rc, &class);
    if (j->kind < HD_SEND)
        snprintf(number, sizeof number, " #%u", j->seq);
    if (hd_ft_on(j->comm->session) && hd_ft_explains(j->comm->session, rc)) {
        hd_text_init(&t, why, sizeof why);
        hd_ft_say_why(j->comm->session, &t);
        hd_fail(j, HD_ERR_FAILED,
                "%s: %s%s of group '%s' (this is rank %d of %d) fails, as do all "
                "operations until the ranks that are left call reconfigure()",
                why, j->api, number, j->comm->name, j->comm->rank, j->comm->size);
        return 1;
    }
    hd_text_init(&t, why, sizeof why);
    hd_mpi_lock(j->comm->session);
    died = hd_ft_say_failed(j->comm, rc, &t);
    hd_mpi_unlock(j->comm->session);
    if (died) {
        hd_fail(j, HD_ERR_FAILED,
                "%s of group '%s' died: %s%s cannot complete (this is rank %d of %d%s%s)", why,
                j->comm->name, j->api, number, j->comm->rank, j->comm->size,
                j->site[0] ? ", called at " : "", j->site);
        return 1;
    }
    MPI_Error_string(rc, what, &len);
    hd_fail(j, class == MPI_ERR_TRUNCATE ? HD_ERR_MISMATCH : HD_ERR_BACKEND,
            "%s failed in %s #%u of group '%s' (this is rank %d of %d): %s", call, j->api, j->seq,
            j->comm->name, j->comm->rank, j->comm->size, what);
    return 1;
}

void hd_job_describe(hd_text *t, const hd_job *j)
{
    const char *sep = "";
    hd_say(t, "%s(", j->api);
    if (j->closing) {
        hd_say(t, ")");
        return;
    }
    if (j->refusal.why) {
        hd_say(t, "...), and refused its arguments: %s", j->refusal.why);
        return;
    }
    if (j->dtype >= 0) {
        hd_say(t, "%s[", hd_dtype_name(j->dtype));
        if (j->ndim > HD_MAX_DIMS) {
            hd_say(t, "%lld elements", (long long)j->count);
        } else {
            for (int i = 0; i < j->ndim; i++)
                hd_say(t, "%s%lld", i ? ", " : "", (long long)j->dims[i]);
        }
        hd_say(t, "]");
        sep = ", ";
    }
    if (j->permuted) {
        hd_say(t, "%snot C-contiguous", sep);
        sep = ", ";
    }
    if (j->redop >= 0) {
        hd_say(t, "%sop=%s", sep, hd_op_name(j->redop));
        if (j->redop == HD_PREMUL_SUM)
            hd_say(t, "(%g)", j->factor);
        sep = ", ";
    }
    if (j->root >= 0) {
        hd_say(t, "%sroot=%d", sep, j->root);
        sep = ", ";
    }
    if (j->listed) {
        const int outs = j->kind == HD_GATHER || j->kind == HD_ALL_GATHER ||
                         j->kind == HD_ALL_TO_ALL || j->kind == HD_ALL_REDUCE;
        const int n = outs ? j->nout : j->nin;
        const hd_seg *list = outs ? j->out : j->in;
        hd_say(t, "%ssizes=[", sep);
        for (int i = 0; i < n && i < 16; i++)
            hd_say(t, "%s%lld", i ? ", " : "", (long long)list[i].n);
        hd_say(t, n > 16 ? ", ...]" : "]");
        sep = ", ";
    }
    if (j->extra) {
        const char *what = j->extra_is ? j->extra_is : "list length";
        if (j->extra >> 32)
            what = "digest of the arguments";
        hd_say(t, "%s%s %lld", sep, what, (long long)(j->extra & UINT32_MAX));
        sep = ", ";
    }
    hd_say(t, j->all_async ? "%sasync_op=True)" : "%s)", j->all_async ? sep : "");
    if (j->checked.checksum)
        hd_say(t, " -> result with checksum %016llx", (unsigned long long)j->checked.checksum);
}

void hd_job_waiter(hd_waiter *w, int spin, hd_job *j)
{
    hd_waiter_init(w, spin, j->timeout);
    w->clock = &j->begun;
}

double hd_job_elapsed(const hd_job *j)
{
    return j->begun ? (double)(hd_now() - j->begun) * 1e-9 : 0.0;
}

int64_t hd_job_data_until(const hd_job *j, int64_t now)
{
    const int64_t limit = hd_ns(j->timeout), least = hd_ns(DATA_LEAST);
    const int64_t until = hd_later(j->begun ? j->begun : now, limit),
                  soon = hd_later(now, limit < least ? limit : least);
    return until > soon ? until : soon;
}

int64_t hd_job_begun_again(const hd_job *j, int64_t now)
{
    return j->begun ? hd_job_data_until(j, now) - hd_ns(j->timeout) : 0;
}

int hd_job_state(const hd_job *j) { return __atomic_load_n(&j->state, __ATOMIC_ACQUIRE); }

void hd_job_finish(hd_job *j)
{
    hd_comm *c = j->comm;
    const int watched =
        __atomic_exchange_n(&j->watched, HD_WATCH_OVER, __ATOMIC_ACQ_REL) == HD_WATCHED;
    if (j->kind >= HD_SEND) { /* who waits for a message looks at MPI */
        __atomic_store_n(&j->state, HD_DONE, __ATOMIC_RELEASE);
    } else {
        pthread_mutex_lock(&c->mu);
        __atomic_store_n(&j->state, HD_DONE, __ATOMIC_RELEASE);
        pthread_mutex_unlock(&c->mu);
        /* Without the mutex, on which a waiter would block again. */
        pthread_cond_broadcast(&c->lane.done_cv);
    }
    if (watched && hd_py.notify)
        hd_py.notify(j);
}

void hd_job_unref(hd_job *j)
{
    if (__atomic_sub_fetch(&j->refs, 1, __ATOMIC_ACQ_REL) == 0 && hd_py.release)
        hd_py.release(j);
}

int hd_job_wait(hd_job *j, double seconds)
{
    hd_comm *c = j->comm;
    struct timespec until;
    int64_t end;
    int spins;

    /* The group may have been destroyed since, and then has no session. */
    if (hd_job_state(j) == HD_DONE)
        return 1;
    /* Only if the lane has a core besides this one: otherwise the lane would wait for the core that
     * spins here. */
    spins = hd_session_spin(c->session, 1) ? 2000 : 0;
    for (int i = 0; i < spins; i++) {
        if (hd_job_state(j) == HD_DONE)
            return 1;
        hd_pause();
    }
    end = hd_later(hd_uptime(), hd_ns(seconds));
    until = (struct timespec){end / 1000000000, end % 1000000000};
    pthread_mutex_lock(&c->mu);
    while (hd_job_state(j) != HD_DONE)
        if (pthread_cond_timedwait(&c->lane.done_cv, &c->mu, &until) == ETIMEDOUT)
            break;
    pthread_mutex_unlock(&c->mu);
    return hd_job_state(j) == HD_DONE;
}
