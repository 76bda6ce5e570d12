/* The post of a group that spans nodes: see hd_post.h. */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "hd_base.h"
#include "hd_comm.h"
#include "hd_job.h"
#include "hd_outbox.h"
#include "hd_post.h"
#include "hd_threads.h"

#define TAG_NOTE 1
#define FLUSH_S 1.0 /* seconds to wait until this rank's own notes have gone */

hd_ballot *hd_post_ballot(void)
{
    hd_ballot *b = calloc(1, sizeof *b);
    if (b)
        b->req[0] = b->req[1] = MPI_REQUEST_NULL;
    return b;
}

int hd_post_open(hd_comm *c)
{
    hd_post *p = calloc(1, sizeof *p);
    if (p) {
        p->ballot = hd_post_ballot();
        p->others = malloc((size_t)c->size * sizeof *p->others);
    }
    if (!p || !p->ballot || !p->others)
        return HD_ERR_MEMORY;
    for (int i = 1; i < c->size; i++)
        p->others[i - 1] = (c->rank + i) % c->size; /* not all ranks write to the same one first */
    c->post = p;
    if (MPI_Comm_dup(c->mpi, &p->mpi))
        return HD_ERR_BACKEND;
    return MPI_Comm_set_errhandler(p->mpi, MPI_ERRORS_RETURN) ? HD_ERR_BACKEND : HD_OK;
}

int hd_post_tidy(hd_post *p)
{
    for (hd_ballot **at = &p->left; *at;) {
        hd_ballot *b = *at;
        int done = 0;
        if (!MPI_Testall(2, b->req, &done, MPI_STATUSES_IGNORE) && done) {
            *at = b->next;
            free(b);
        } else {
            at = &b->next;
        }
    }
    return hd_outbox_tidy(&p->sent) && !p->left;
}

/* ---- notes ---- */

void hd_post_send(hd_comm *c, int what, int code, double after, const char *text)
{
    hd_post *p = c->post;
    hd_post_note n = {.what = what, .code = code, .check = p->now, .after = after};
    hd_text t;
    int rc; /* the others time out by themselves */
    hd_text_init(&t, n.text, sizeof n.text);
    hd_say(&t, "%s", text);
    hd_mpi_lock(c->session);
    p->unread += hd_outbox_send(&p->sent, p->mpi, &n, offsetof(hd_post_note, text) + t.used + 1,
                                p->others, c->size - 1, TAG_NOTE, &rc);
    hd_mpi_unlock(c->session);
}

void hd_post_flush(hd_comm *c)
{
    const int64_t until = hd_until(FLUSH_S);
    for (;;) {
        const struct timespec nap = {0, 50000};
        int gone;
        hd_mpi_lock(c->session);
        gone = hd_outbox_tidy(&c->post->sent);
        hd_mpi_unlock(c->session);
        if (gone || hd_now() > until)
            return;
        nanosleep(&nap, NULL);
    }
}

/* Receives one note; under hd_mpi_lock. 0: there is none. */
static int read_note(hd_post *p)
{
    hd_post_heard *h;
    MPI_Message message;
    MPI_Status st;
    int there = 0;
    if (MPI_Improbe(MPI_ANY_SOURCE, TAG_NOTE, p->mpi, &there, &message, &st) || !there)
        return 0;
    h = calloc(1, sizeof *h);
    if (!h || MPI_Mrecv(&h->note, (int)sizeof h->note, MPI_BYTE, &message, MPI_STATUS_IGNORE)) {
        free(h);
        return 0;
    }
    p->unread--;
    h->note.text[HD_DESC - 1] = 0;
    h->by = st.MPI_SOURCE;
    if (h->note.check < p->now) {
        free(h);
    } else {
        h->next = p->heard;
        p->heard = h;
    }
    return 1;
}

void hd_post_read(hd_comm *c)
{
    hd_mpi_lock(c->session);
    while (read_note(c->post))
        ;
    hd_mpi_unlock(c->session);
}

void hd_post_forget(hd_post *p, uint64_t before)
{
    for (hd_post_heard **at = &p->heard; *at;) {
        hd_post_heard *h = *at;
        if (!before || h->note.check < before) {
            *at = h->next;
            free(h);
        } else {
            at = &h->next;
        }
    }
}

int hd_post_is_here(const hd_post *p, int rank)
{
    for (const hd_post_heard *h = p->heard; h; h = h->next)
        if (h->by == rank && h->note.check == p->now && h->note.what == HD_POST_HERE)
            return 1;
    return 0;
}

/* The sender gave the check up or refused; or it is in a later check, which it cannot have reached
 * through an outcome of this one as long as this rank has not said yes. */
const hd_post_heard *hd_post_reason(const hd_post *p)
{
    const hd_post_heard *best = NULL;
    int most = p->ballot->voted && p->ballot->seen ? 0 : -1;
    for (const hd_post_heard *h = p->heard; h; h = h->next) {
        const int worth = h->note.check > p->now            ? 0
                          : h->note.what == HD_POST_REFUSED ? 2
                          : h->note.what == HD_POST_GAVE_UP ? 1
                                                            : -1;
        if (worth > most || (worth == most && best && h->by < best->by)) {
            most = worth;
            best = h;
        }
    }
    return best;
}

void hd_post_refused(const hd_post *p, const hd_post_heard *like, hd_refused *out)
{
    out->n = 0;
    memcpy(out->text, like->note.text, sizeof out->text);
    for (const hd_post_heard *h = p->heard; h; h = h->next)
        if (h->note.what == HD_POST_REFUSED && h->note.check == p->now &&
            strcmp(h->note.text, out->text) == 0)
            hd_refused_by(out, h->by);
}

/* ---- the end ---- */

int64_t hd_post_unread(hd_comm *c)
{
    if (!c->post)
        return 0;
    hd_post_read(c);
    return c->post->unread;
}

int hd_post_close(hd_comm *c, int together)
{
    hd_post *p = c->post;
    int clean = 0;
    if (!p)
        return 1;
    hd_mpi_lock(c->session);
    for (int k = 0; k < 1000 && !clean; k++)
        clean = hd_post_tidy(p);
    if (clean && together)
        MPI_Comm_free(&p->mpi);
    hd_mpi_unlock(c->session);
    if (clean) {
        hd_post_forget(p, 0);
        free(p->ballot);
        free(p->others);
        free(p);
        c->post = NULL;
    }
    return clean;
}
