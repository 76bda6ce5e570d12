/* Whose word it is, where several threads hold roll calls: see hd_roll_desk.h.
 *
 * A word from above bears the number of the member's call, one from below its list. If no thread
 * here holds a roll call for that list, one may be about to: the word is kept for it. But if
 * neither process has other threads that could make the call, the ranks disagree, and the roll call
 * that has received the word compares the lists. */
#include <pthread.h>
#include <stdlib.h>

#include "hd_base.h"
#include "hd_comm.h"
#include "hd_job.h"
#include "hd_roll_desk.h"
#include "hd_roll_words.h"

typedef struct hd_letter {
    struct hd_letter *next;
    int from, tag;
    hd_word word;
} hd_letter;

struct hd_desk {
    pthread_mutex_t mu;
    hd_roll *calls;
    hd_letter *kept; /* for a call that no thread has begun yet */
};

hd_desk *hd_desk_of(hd_comm *c)
{
    pthread_mutex_lock(&c->mu);
    if (!c->desk && (c->desk = calloc(1, sizeof *c->desk)))
        pthread_mutex_init(&c->desk->mu, NULL);
    pthread_mutex_unlock(&c->mu);
    return c->desk;
}

static void drop(hd_letter **at)
{
    hd_letter *l = *at;
    *at = l->next;
    free(l);
}

void hd_desk_free(hd_desk *d)
{
    if (!d)
        return;
    while (d->kept)
        drop(&d->kept);
    pthread_mutex_destroy(&d->mu);
    free(d);
}

static void append(hd_letter **box, hd_letter *l)
{
    while (*box)
        box = &(*box)->next;
    l->next = NULL;
    *box = l;
}

/* Keeps a word for a later call, in place of those that it makes void. */
static void keep(hd_desk *d, hd_letter *l)
{
    const hd_word *w = &l->word;
    for (hd_letter **at = &d->kept; *at;) {
        const hd_letter *old = *at;
        const int same = old->from == l->from && old->tag == l->tag;
        if (same && (w->what == HD_HELLO ? old->word.list == w->list
                                         : w->what == HD_BYE && old->word.number == w->number))
            drop(at);
        else
            at = &(*at)->next;
    }
    if (w->what == HD_BYE)
        free(l);
    else
        append(&d->kept, l);
}

void hd_desk_open(hd_roll *r, uint64_t number)
{
    hd_desk *d = r->desk;
    r->number = number;
    r->letters = NULL;
    if (!d)
        return;
    r->several = hd_py.several && hd_py.several();
    pthread_mutex_lock(&d->mu);
    r->next = d->calls;
    d->calls = r;
    for (hd_letter **at = &d->kept; *at;) {
        hd_letter *l = *at;
        if (l->tag == r->tag && l->word.list == r->list) {
            *at = l->next;
            append(&r->letters, l);
        } else {
            at = &l->next;
        }
    }
    pthread_mutex_unlock(&d->mu);
}

void hd_desk_close(hd_roll *r, int made)
{
    hd_desk *d = r->desk;
    hd_roll **at;
    if (!d)
        return;
    pthread_mutex_lock(&d->mu);
    for (at = &d->calls; *at != r; at = &(*at)->next)
        ;
    *at = r->next;
    while (r->letters) {
        hd_letter *l = r->letters;
        r->letters = l->next;
        if (made || l->tag != r->tag)
            free(l);
        else
            keep(d, l); /* of the next attempt: its member has come already */
    }
    pthread_mutex_unlock(&d->mu);
}

static int take(hd_letter **box, int from, int tag, hd_word *w)
{
    for (; *box; box = &(*box)->next)
        if ((*box)->from == from && (*box)->tag == tag) {
            *w = (*box)->word;
            drop(box);
            return 1;
        }
    return 0;
}

/* The call that a word is for, or NULL. */
static hd_roll *owner(const hd_desk *d, int tag, const hd_word *w)
{
    for (hd_roll *r = d->calls; r; r = r->next)
        if (tag == r->tag ? w->list == r->list : tag == r->tag + 32 && w->number == r->number)
            return r;
    return NULL;
}

/* Puts away a word that is not for this call. 0: it is. */
static int put_away(hd_roll *r, int from, int tag, const hd_word *w)
{
    hd_roll *mine = owner(r->desk, tag, w);
    hd_letter *l;
    if (mine == r || (!mine && (tag != r->tag || !(r->several || w->several))))
        return 0;
    if (!(l = malloc(sizeof *l)))
        return -1;
    *l = (hd_letter){.from = from, .tag = tag, .word = *w};
    if (mine)
        append(&mine->letters, l);
    else
        keep(r->desk, l);
    return 1;
}

int hd_desk_hear(hd_roll *r, int from, int tag, hd_word *w, int *there)
{
    hd_desk *d = r->desk;
    int code = HD_OK, other = 1;
    if (!d)
        return hd_roll_hear(r, from, tag, w, there);
    pthread_mutex_lock(&d->mu);
    *there = take(&r->letters, from, tag, w);
    while (!*there && other > 0) {
        if ((code = hd_roll_hear(r, from, tag, w, there)) || !*there)
            break;
        other = put_away(r, from, tag, w);
        *there = !other;
    }
    pthread_mutex_unlock(&d->mu);
    return other < 0 ? HD_ERR_MEMORY : code;
}

int hd_desk_elsewhere(const hd_roll *r, int from, uint64_t *list)
{
    int found = 0;
    if (!r->desk)
        return 0;
    pthread_mutex_lock(&r->desk->mu);
    for (const hd_letter *l = r->desk->kept; l; l = l->next)
        if (l->from == from && l->tag == r->tag && l->word.list != r->list) {
            found = 1;
            *list = l->word.list;
        }
    pthread_mutex_unlock(&r->desk->mu);
    return found;
}
