/* The post of a group that spans nodes: see hd_post.h. */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "hd_base.h"
#include "hd_caucus.h"
#include "hd_caucus_life.h"
#include "hd_comm.h"
#include "hd_here.h"
#include "hd_job.h"
#include "hd_outbox.h"
#include "hd_post.h"
#include "hd_rounds.h"
#include "hd_threads.h"

#define TAG_NOTE 1
#define TAG_CLOSED 4
#define FLUSH_S 1.0 /* seconds to wait until this rank's own notes have gone */

int hd_post_open(hd_comm *c, int *rc)
{
    hd_post *p = c->post = hd_pages(sizeof *p);
    *rc = MPI_SUCCESS;
    if (p) {
        p->mpi = MPI_COMM_NULL;
        p->passes_on = c->size > HD_POST_STAR;
        p->to = malloc((p->passes_on ? 32 : (size_t)c->size) * sizeof *p->to);
    }
    if (p)
        p->closed = calloc((size_t)c->size, 1);
    if (!p || !p->to || !p->closed || hd_here_open(&p->here, c->size))
        return HD_ERR_MEMORY;
    /* From this rank on: not all write to the same one first. */
    for (int64_t i = 1; i < c->size; i = p->passes_on ? 2 * i : i + 1)
        p->to[p->n_to++] = (int)((c->rank + i) % c->size);
    if ((*rc = MPI_Comm_dup(c->mpi, &p->mpi))) {
        p->mpi = MPI_COMM_NULL;
        return HD_ERR_BACKEND;
    }
    p->here.mpi = p->mpi;
    p->here.to = p->to;
    p->here.n_to = p->n_to;
    p->here.in_turn = p->passes_on;
    *rc = MPI_Comm_set_errhandler(p->mpi, MPI_ERRORS_RETURN);
    return *rc ? HD_ERR_BACKEND : HD_OK;
}

int hd_post_by_nodes(const hd_comm *c) { return c->post && c->post->caucus; }

int hd_post_tidy(hd_post *p)
{
    return hd_rounds_tidy(&p->rounds) & hd_outbox_tidy(&p->sent) & hd_outbox_tidy(&p->here.sent);
}

int hd_post_unsent(hd_post *p)
{
    /* Few questions where something is: Open MPI goes through all that it has kept. */
    return hd_outbox_unsent(&p->sent) || hd_rounds_unsent(&p->rounds) ||
           hd_outbox_unsent(&p->here.sent);
}

/* ---- notes ---- */

static void send_note(hd_comm *c, const hd_post_note *n)
{
    hd_post *p = c->post;
    int rc; /* the others time out by themselves */
    hd_mpi_lock(c->session);
    p->stuck = hd_outbox_unsent(&p->sent);
    p->unread +=
        hd_outbox_send(&p->sent, p->mpi, n, offsetof(hd_post_note, text) + strlen(n->text) + 1,
                       HD_OUTBOX_WHOLE, p->to, p->n_to, TAG_NOTE, &rc);
    hd_mpi_unlock(c->session);
}

void hd_post_send(hd_comm *c, int what, int code, double after, const char *text)
{
    hd_post_note n = {.what = what,
                      .code = code,
                      .by = c->rank,
                      .check = c->post->now,
                      .after = after};
    hd_text t;
    hd_text_init(&t, n.text, sizeof n.text);
    hd_say(&t, "%s", text);
    send_note(c, &n);
}

void hd_post_pass_on(hd_comm *c, const hd_post_heard *h)
{
    if (!c->post->passes_on)
        return;
    if (h && h->note.check == c->post->now)
        send_note(c, &h->note);
    else
        hd_post_send(c, HD_POST_GAVE_UP, HD_ERR_TIMEOUT, 0, "");
    hd_post_flush(c);
}

void hd_post_tell(hd_comm *c, int announce)
{
    hd_post *p = c->post;
    if (announce && !p->here.announced)
        hd_here_announce(&p->here, p->now, c->rank);
    hd_mpi_lock(c->session);
    p->unread += hd_here_tell(&p->here, p->now);
    hd_mpi_unlock(c->session);
}

void hd_post_flush(hd_comm *c)
{
    const int64_t until = hd_until(FLUSH_S);
    for (;;) {
        const struct timespec nap = {0, 50000};
        int gone;
        hd_mpi_lock(c->session);
        gone = !hd_outbox_unsent(&c->post->sent);
        hd_mpi_unlock(c->session);
        if (gone || hd_now() > until || (c->post->stuck && !hd_session_serialized(c->session)))
            return;
        nanosleep(&nap, NULL);
    }
}

void hd_post_part(hd_post *p, int code, const char *text)
{
    hd_text t;
    if (p->apart[0])
        return;
    hd_text_init(&t, p->apart, sizeof p->apart);
    hd_say(&t, "%s", text);
    p->apart_code = code;
}

static int has_note(const hd_post *p, const hd_post_note *n)
{
    for (const hd_post_heard *h = p->heard; h; h = h->next)
        if (h->note.by == n->by && h->note.check == n->check)
            return 1;
    return 0;
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
    if (h->note.what == HD_POST_APART)
        hd_post_part(p, h->note.code, h->note.text);
    if (h->note.check < p->oldest || has_note(p, &h->note)) {
        free(h);
    } else {
        h->next = p->heard;
        p->heard = h;
    }
    return 1;
}

/* Under hd_mpi_lock. 0: there is none. */
static int read_closed(hd_post *p)
{
    MPI_Message message;
    MPI_Status st;
    int there = 0;
    char byte;
    if (MPI_Improbe(MPI_ANY_SOURCE, TAG_CLOSED, p->mpi, &there, &message, &st) || !there)
        return 0;
    __atomic_store_n(&p->closed[st.MPI_SOURCE], 1, __ATOMIC_RELEASE);
    return !MPI_Mrecv(&byte, 1, MPI_BYTE, &message, MPI_STATUS_IGNORE);
}

void hd_post_read(hd_comm *c)
{
    hd_post *p = c->post;
    hd_mpi_lock(c->session);
    /* In the opposite order of their sends: whoever is in a later check has sent its notes before
     * its lists, and whoever has destroyed the group says so last. */
    while (read_closed(p))
        p->unread--;
    while (hd_here_read(&p->here))
        p->unread--;
    while (read_note(p))
        ;
    hd_mpi_unlock(c->session);
}

void hd_post_forget(hd_post *p, uint64_t before)
{
    p->oldest = before;
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

/* How much a note says of why the present check is abandoned. */
static int worth_of(const hd_post *p, const hd_post_note *note)
{
    if (note->check > p->now)
        return 0;
    if (note->what == HD_POST_REFUSED)
        return 5;
    if (!note->text[0])
        return 1;
    if (note->what == HD_POST_LOST)
        return 4;
    return note->what == HD_POST_GAVE_UP || note->what == HD_POST_APART ? 3 : 2;
}

const hd_post_heard *hd_post_reason(const hd_post *p)
{
    const hd_post_heard *best = NULL;
    int most = 0;
    for (const hd_post_heard *h = p->heard; h; h = h->next) {
        const int worth = worth_of(p, &h->note);
        if (worth > most || (worth == most && best && h->note.by < best->note.by)) {
            most = worth;
            best = h;
        }
    }
    return best;
}

int hd_post_has(const hd_post *p, int rank)
{
    for (const hd_post_heard *h = p->heard; h; h = h->next)
        if (h->note.by == rank && h->note.check >= p->now)
            return 1;
    return 0;
}

int hd_post_arrived(const void *post, int rank)
{
    const hd_post *p = post;
    return hd_here_has(&p->here, p->now, rank) || hd_post_has(p, rank);
}

int hd_post_may_be_short(const hd_post *p)
{
    return p->rounds.is_fast && p->rounds.first.letter.kind != HD_NO_LETTER;
}

/* A rank gave the check up or refused, or the one before, from which this rank has gone on, or the
 * ranks are apart; or it is in a later check, which it cannot have reached through an outcome of
 * this one as long as this rank, or who speaks for it, has not said yes. */
int hd_post_abandoned(const hd_post *p)
{
    const int open =
        !(p->rounds.voted && p->rounds.seen) && !(p->caucus && hd_caucus_spoken(p->caucus, p->now));
    int later = hd_here_later(&p->here, p->now);
    if (hd_post_reason(p))
        return 1;
    for (const hd_post_heard *h = p->heard; h; h = h->next)
        later |= h->note.check > p->now;
    return open && (p->apart[0] || (later && !hd_post_may_be_short(p)));
}

void hd_post_close_early(hd_comm *c)
{
    hd_post *p = c->post;
    int rc; /* the others time out by themselves */
    hd_mpi_lock(c->session);
    p->unread +=
        hd_outbox_send(&p->sent, p->mpi, "", 1, HD_OUTBOX_WHOLE, p->to, p->n_to, TAG_CLOSED, &rc);
    hd_mpi_unlock(c->session);
}

int hd_post_closed(const hd_comm *c, int rank)
{
    const hd_post *p = c->post;
    int there = __atomic_load_n(&p->closed[rank], __ATOMIC_ACQUIRE);
    MPI_Status st;
    if (there)
        return 1;
    hd_mpi_lock(c->session);
    if (MPI_Iprobe(rank, TAG_CLOSED, p->mpi, &there, &st))
        there = 0;
    hd_mpi_unlock(c->session);
    return there;
}

void hd_post_refused(const hd_post *p, const hd_post_heard *like, hd_refused *out)
{
    out->n = 0;
    memcpy(out->text, like->note.text, sizeof out->text);
    for (const hd_post_heard *h = p->heard; h; h = h->next)
        if (h->note.what == HD_POST_REFUSED && h->note.check == p->now &&
            strcmp(h->note.text, out->text) == 0)
            hd_refused_by(out, h->note.by);
}

/* ---- the end ---- */

void hd_post_end(hd_post *p)
{
    /* Without memory its ballots stay unread, and all keep the communicator. */
    if (hd_post_votes(p))
        (void)hd_rounds_end(&p->rounds, hd_post_voters(p));
}

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
    int clean = 0, down = 0;
    if (!p)
        return 1;
    MPI_Finalized(&down);
    if (down)
        return 0;
    hd_mpi_lock(c->session);
    for (int k = 0; k < 1000 && !clean; k++)
        clean = hd_post_tidy(p);
    if (clean)
        hd_rounds_close(&p->rounds);
    if (clean && together && p->mpi != MPI_COMM_NULL)
        MPI_Comm_free(&p->mpi);
    if (clean && p->caucus)
        hd_caucus_free(p->caucus);
    hd_mpi_unlock(c->session);
    if (clean) {
        hd_post_forget(p, 0);
        hd_here_close(&p->here);
        free(p->to);
        free(p->closed);
        hd_pages_free(p, sizeof *p);
        c->post = NULL;
    }
    return clean;
}
