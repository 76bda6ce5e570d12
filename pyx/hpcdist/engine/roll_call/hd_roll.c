/* The members form a tree; its root, the first member, leads. A member says hello to its parent;
 * the parent says go, if it is there. When all below a member have promised, and it has heard go,
 * it promises its parent to wait for the verdict. When all have promised the leader, the verdict
 * is that they go on, and each member passes it down.
 *
 * A member may leave on its own before it has promised; it then gives the members below the
 * verdict. After that it can only say that it wants to leave (by the same word, bye), which goes up
 * to the leader and ends the roll call, and the verdict from above counts. The parent is there: it
 * has said go. So no member goes on alone.
 *
 * Each call of a member has a random number. A message left over from a call that has ended has no
 * effect: the parent answers it, but no promise follows, because its member no longer waits for
 * that number.
 *
 * A member that waits for others below tells its parent which, each time that they have changed,
 * so that the leader can name them. A member whose parent is silent says hello to the leader as
 * well, which says go; thus the members below one that is missing are not taken for missing, and
 * one whose list leads to another tree is found. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "hd_base.h"
#include "hd_job.h"
#include "hd_roll.h"
#include "hd_roll_desk.h"
#include "hd_roll_words.h"

#ifndef HD_ROLL_STAR
#define HD_ROLL_STAR 33 /* up to so many members the leader is the parent of all */
#define HD_ROLL_ARITY 8 /* else each has so many below */
#endif
#define LEAVE_S 0.3 /* seconds for the verdict, once a member's time is over */
#define ASK_S 0.25  /* seconds for the parent's go, before a member turns to the leader */

/* A member below this one. */
typedef struct contact {
    int at;          /* its place in the list */
    uint64_t number; /* of its call; 0: not here */
    int promised;
    int live;       /* it has answered in this call */
    hd_reason lack; /* the members that it lacks, as far as it has said */
} contact;

typedef struct call {
    hd_roll *r;
    int at, arity, kids; /* this member's place, and how many are directly below it */
    int parent;          /* its place */
    uint64_t number;
    contact *kid;
    contact *stray; /* the leader's: members that turned to it because their parents are silent */
    int strays, *stray_of; /* stray_of: 1 + index, by place */
    int heard;             /* the parent has said go; */
    int asked, adopted;    /* hello to the leader as well; it has said go */
    int promised, leaves, interrupted;
    int64_t last;     /* ns: a member that leaves waits so long for the verdict */
    hd_reason told;   /* what was reported last */
    hd_reason reason; /* why it leaves, or the verdict */
    uint64_t odd;     /* HD_ROLL_LISTS: the list of reason.who */
} call;

static int kids_of(const call *k, int at)
{
    const int64_t first = (int64_t)k->arity * at + 1, left = k->r->n - first;
    return left < 0 ? 0 : left > k->arity ? k->arity : (int)left;
}

static int rank_at(const call *k, int at) { return k->r->ranks[at]; }

static int say_up(call *k, int to, hd_word w)
{
    w.number = k->number;
    w.level = k->r->level;
    w.several = (int16_t)k->r->several;
    w.list = k->r->list;
    return hd_roll_say(k->r, rank_at(k, to), k->r->tag, &w);
}

static int say_down(call *k, int to, hd_word w)
{
    return hd_roll_say(k->r, rank_at(k, to), k->r->tag + 32, &w);
}

/* ---- who is missing ---- */

/* The leader's view: a member without a word, and all below it but those that turned to the
 * leader. */
static void expand(const call *k, hd_reason *out, int at)
{
    const int i = k->stray_of ? k->stray_of[at] : 0, kids = kids_of(k, at);
    const contact *s = i ? &k->stray[i - 1] : NULL;
    if (s && s->number && s->live) {
        for (int m = 0; m < s->lack.missing && m < HD_ROLL_NAMED; m++)
            if (s->lack.named[m] > at && s->lack.named[m] < k->r->n)
                expand(k, out, s->lack.named[m]);
        return;
    }
    hd_roll_name(out, rank_at(k, at));
    for (int m = 1; m <= kids; m++)
        expand(k, out, k->arity * at + m);
}

/* Fills in who is missing: ranks, if this is the leader, else places in the list. */
static void find_missing(const call *k, hd_reason *out)
{
    out->missing = 0;
    for (int i = 0; i < k->kids; i++) {
        const contact *m = &k->kid[i];
        if (m->promised)
            continue;
        if (!m->number && !k->at)
            expand(k, out, m->at);
        else if (!m->number)
            hd_roll_name(out, m->at);
        for (int l = 0; m->number && l < m->lack.missing && l < HD_ROLL_NAMED; l++)
            if (k->at)
                hd_roll_name(out, m->lack.named[l]);
            else if (m->lack.named[l] > m->at && m->lack.named[l] < k->r->n)
                expand(k, out, m->lack.named[l]);
    }
    if (!k->at)
        hd_roll_sort(out);
}

/* Tells the members above which ones this member waits for, if that has changed. */
static int report(call *k)
{
    hd_word w = {.what = HD_REPORT};
    if (!k->at || k->promised || k->leaves || (!k->heard && !k->adopted))
        return HD_OK;
    find_missing(k, &w.reason);
    if (memcmp(&w.reason, &k->told, sizeof k->told) == 0)
        return HD_OK;
    k->told = w.reason;
    return say_up(k, k->heard ? k->parent : 0, w);
}

/* ---- leaving ---- */

/* Those above must hear of it only if they have said go: otherwise this member has not been there
 * for them. */
static int say_bye(call *k, int to, int fatal)
{
    hd_word w = {.what = HD_BYE, .uid = k->odd};
    if (fatal) {
        w.reason = k->reason;
        find_missing(k, &w.reason);
    }
    return say_up(k, to, w);
}

static int leave(call *k, hd_reason reason, uint64_t odd)
{
    int code = HD_OK;
    if (k->leaves)
        return HD_OK;
    k->leaves = 1;
    k->odd = odd;
    k->reason = reason;
    k->last = hd_later(hd_now(), reason.why == HD_ROLL_INTERRUPTED && reason.who == k->r->rank
                                     ? 0
                                     : hd_ns(LEAVE_S));
    if (!k->at)
        return HD_OK;
    code = say_bye(k, k->parent, k->heard);
    if (!code && k->adopted)
        code = say_bye(k, 0, 1);
    else if (!code && k->parent && !k->heard && !k->asked) {
        k->asked = 1;
        code = say_up(k, 0, (hd_word){.what = HD_HELLO});
    }
    return code;
}

static int leave_for(call *k, int why, int code)
{
    return leave(k, (hd_reason){.why = why, .code = code, .who = k->r->rank}, 0);
}

/* The leader compares with itself, where two others disagree. */
static void compare_with_leader(const call *k, hd_reason *x)
{
    const hd_roll *r = k->r;
    const int who_differs = x->why == HD_ROLL_LISTS ? k->odd != r->list : x->levels[1] != r->level;
    if (k->at || (x->why != HD_ROLL_LISTS && x->why != HD_ROLL_LEVELS))
        return;
    if (!who_differs) {
        x->who = x->than;
        x->levels[1] = x->levels[0];
    }
    x->than = r->rank;
    x->levels[0] = r->level;
}

/* ---- the members below ---- */

static int compare(call *k, int who, const hd_word *w)
{
    const hd_roll *r = k->r;
    hd_reason x = {.code = HD_ERR_MISMATCH, .who = who, .than = r->rank};
    x.why = w->list != r->list ? HD_ROLL_LISTS : w->level != r->level ? HD_ROLL_LEVELS : 0;
    x.levels[0] = r->level;
    x.levels[1] = w->level;
    return x.why ? leave(k, x, w->list) : HD_OK;
}

/* Reads what one member has sent meanwhile. */
static int listen(call *k, contact *m, int is_kid)
{
    hd_word w;
    int there, code;
    while (!(code = hd_desk_hear(k->r, rank_at(k, m->at), k->r->tag, &w, &there)) && there) {
        if (w.what == HD_HELLO) {
            *m = (contact){.at = m->at, .number = w.number};
            code = say_down(k, m->at, (hd_word){.what = HD_GO, .number = w.number});
        } else if (!m->number || w.number != m->number) {
            continue; /* left over */
        } else if (w.what == HD_BYE && !w.reason.why) {
            m->number = 0;
        } else {
            m->live = 1;
            m->lack = w.reason;
            if (w.what == HD_BYE) {
                code = leave(k, w.reason, w.uid);
            } else {
                m->promised = is_kid && w.what == HD_PROMISE;
                code = compare(k, rank_at(k, m->at), &w);
            }
        }
        if (code)
            return code;
    }
    return code;
}

/* The leader's: members that are not directly below it. */
static int listen_to_strays(call *k)
{
    for (int at = k->kids + 1; at < k->r->n; at++) {
        contact fresh = {.at = at}, *m = &fresh;
        int code;
        if (k->stray_of && k->stray_of[at])
            m = &k->stray[k->stray_of[at] - 1];
        if ((code = listen(k, m, 0)))
            return code;
        if (m == &fresh && fresh.number) {
            contact *more = realloc(k->stray, (size_t)(k->strays + 1) * sizeof *more);
            if (more)
                k->stray = more;
            if (!k->stray_of)
                k->stray_of = calloc((size_t)k->r->n, sizeof *k->stray_of);
            if (!more || !k->stray_of)
                return HD_ERR_MEMORY;
            k->stray[k->strays++] = fresh;
            k->stray_of[at] = k->strays;
        }
    }
    return HD_OK;
}

/* HD_OK: go on and tell the members below; -1: not yet. */
static int advance(call *k)
{
    if (k->leaves || k->promised)
        return -1;
    for (int i = 0; i < k->kids; i++)
        if (!k->kid[i].promised)
            return -1;
    if (!k->at)
        return HD_OK;
    if (!k->heard)
        return -1;
    k->promised = 1;
    return say_up(k, k->parent, (hd_word){.what = HD_PROMISE}) ? HD_ERR_BACKEND : -1;
}

/* ---- those above ---- */

/* Reads the words of the parent, or of the leader. -1: no verdict yet. */
static int heed(call *k, int from)
{
    hd_word w;
    int there, code;
    while (!(code = hd_desk_hear(k->r, rank_at(k, from), k->r->tag + 32, &w, &there)) && there) {
        if (w.number != k->number)
            continue; /* left over */
        if (w.what == HD_VERDICT) {
            k->reason = w.reason;
            k->r->uid = w.uid;
            return w.reason.code;
        }
        if (from == k->parent) {
            k->heard = !k->leaves;
            continue;
        }
        k->adopted = 1;
        memset(&k->told, -1, sizeof k->told); /* in any case */
        if ((code = k->leaves ? say_bye(k, 0, 1) : report(k)))
            return code;
    }
    return code ? code : -1;
}

/* Gives the verdict to the members below. */
static int pass_down(call *k)
{
    hd_word w = {.what = HD_VERDICT, .uid = k->r->uid, .reason = k->reason};
    int code = HD_OK, rc;
    for (int i = 0; i < k->kids + k->strays; i++) {
        const contact *m = i < k->kids ? &k->kid[i] : &k->stray[i - k->kids];
        if (!m->number || (i >= k->kids && !k->reason.code))
            continue;
        w.number = m->number;
        rc = say_down(k, m->at, w);
        code = code ? code : rc;
    }
    if (k->reason.code || k->kids)
        hd_roll_flush(k->r);
    return code;
}

/* ---- the call ---- */

/* The time of a member that leaves is over, or it leads: it decides for those below. */
static int end_here(call *k)
{
    hd_reason *x = &k->reason;
    const int silent = k->at && !k->heard;
    compare_with_leader(k, x);
    find_missing(k, x);
    for (int i = 0; k->at && i < x->missing && i < HD_ROLL_NAMED; i++)
        x->named[i] = rank_at(k, x->named[i]);
    if (silent && k->parent)
        hd_roll_name(x, rank_at(k, k->parent));
    if (silent && !k->adopted && x->why == HD_ROLL_GAVE_UP) {
        x->why = HD_ROLL_ALONE;
        x->who = rank_at(k, 0);
    }
    for (int i = 0; i < k->kids && !x->missing; i++) /* here, but its own members are not */
        if (!k->kid[i].promised && x->why == HD_ROLL_SILENT)
            hd_roll_name(x, rank_at(k, k->kid[i].at));
    return x->code;
}

/* The ranks disagree, and the leader knows at once: but a member whose list leads to another tree
 * turns to it only now. */
static void linger(call *k)
{
    const int64_t until = hd_until(ASK_S + LEAVE_S);
    const struct timespec nap = {0, 1000000};
    hd_word verdict = {.what = HD_VERDICT, .reason = k->reason};
    if (k->at || k->r->n <= HD_ROLL_STAR || k->interrupted ||
        (k->reason.why != HD_ROLL_LISTS && k->reason.why != HD_ROLL_LEVELS))
        return;
    for (; hd_now() < until; nanosleep(&nap, NULL))
        for (int at = k->kids + 1; at < k->r->n; at++) {
            hd_word w;
            int there;
            while (!hd_desk_hear(k->r, rank_at(k, at), k->r->tag, &w, &there) && there) {
                verdict.number = w.number;
                if (w.what == HD_HELLO)
                    say_down(k, at, verdict);
            }
        }
    hd_roll_flush(k->r);
}

static int look_up(call *k)
{
    int code = -1;
    if (k->at)
        code = heed(k, k->parent);
    if (code < 0 && k->asked)
        code = heed(k, 0);
    return code;
}

static int look_down(call *k)
{
    int code = HD_OK;
    for (int i = 0; i < k->kids && !code; i++)
        code = listen(k, &k->kid[i], 1);
    return code ? code : advance(k);
}

/* Every 50 ms. */
static int look_around(call *k, const hd_waiter *w, double patience)
{
    int code = HD_OK, vain;
    if (!k->interrupted && hd_py.slow && hd_py.slow(NULL)) {
        k->interrupted = 1;
        code = leave_for(k, HD_ROLL_INTERRUPTED, HD_ERR_TIMEOUT);
    }
    if (!code && !k->leaves && k->r->vain && (vain = k->r->vain(k->r->parent)))
        code = leave_for(k, vain, vain == HD_ROLL_VAIN ? HD_ERR_FAILED : HD_ERR_CLOSED);
    if (!code && !k->at)
        code = listen_to_strays(k);
    if (!code && k->parent > 0 && !k->heard && !k->asked && !k->leaves &&
        hd_waiter_elapsed(w) > (patience < 2 * ASK_S ? patience / 2 : ASK_S)) {
        k->asked = 1;
        code = say_up(k, 0, (hd_word){.what = HD_HELLO});
    }
    return code ? code : report(k);
}

/* The time is over. A member that calls for other members, which no thread has done here, is not
 * missing: the ranks disagree. */
static int give_up(call *k)
{
    const hd_roll *r = k->r;
    hd_reason x = {.why = k->at ? HD_ROLL_GAVE_UP : HD_ROLL_SILENT,
                   .code = HD_ERR_TIMEOUT,
                   .who = r->rank};
    uint64_t list = 0;
    for (int i = 0; i < k->kids; i++)
        if (!k->kid[i].number && hd_desk_elsewhere(r, rank_at(k, k->kid[i].at), &list)) {
            x = (hd_reason){.why = HD_ROLL_LISTS,
                            .code = HD_ERR_MISMATCH,
                            .who = rank_at(k, k->kid[i].at),
                            .than = r->rank};
            break;
        }
    return leave(k, x, list);
}

/* The leader keeps a verdict on levels back for members that are late: with nobody here they would
 * wait for their timeout. */
static int awaits(const call *k)
{
    const hd_roll *r = k->r;
    int i = 0;
    while (i < k->kids && k->kid[i].number)
        i++;
    return i < k->kids && k->reason.why == HD_ROLL_LEVELS && !k->interrupted &&
           hd_now() < r->until && !(r->vain && r->vain(r->parent));
}

/* The verdict, or the code of an error. */
static int wait_for_verdict(call *k)
{
    const hd_roll *r = k->r;
    const int64_t now = hd_now();
    const double patience = r->until == HD_NEVER ? 1e9 : (double)(r->until - now) * 1e-9;
    hd_waiter w;
    int code = k->at ? say_up(k, k->parent, (hd_word){.what = HD_HELLO}) : HD_OK;

    if (code)
        return code;
    hd_waiter_init(&w, 0, -1);
    for (;;) {
        int ev;
        if ((code = look_up(k)) >= 0 || (code = look_down(k)) >= 0)
            return code;
        ev = hd_waiter_step(&w);
        if ((ev & HD_WAIT_HOOK) && (code = look_around(k, &w, patience)))
            return code;
        if ((ev & HD_WAIT_CLOCK) && !k->leaves && hd_now() >= r->until && (code = give_up(k)))
            return code;
        if (k->leaves &&
            (k->at ? !k->promised && (ev & HD_WAIT_CLOCK) && hd_now() >= k->last : !awaits(k)))
            return end_here(k);
    }
}

int hd_roll_call(hd_roll *r)
{
    call k = {.r = r, .number = hd_random64() | 1};
    int code, rc;

    r->text[0] = 0;
    r->advised = 0;
    r->uid = hd_random64();
    if (r->n < 2)
        return HD_OK;
    while (r->ranks[k.at] != r->rank)
        k.at++;
    k.arity = r->n <= HD_ROLL_STAR ? r->n - 1 : HD_ROLL_ARITY;
    k.kids = kids_of(&k, k.at);
    k.parent = k.at ? (k.at - 1) / k.arity : -1;
    if (!(k.kid = calloc((size_t)k.kids + 1, sizeof *k.kid)))
        return HD_ERR_MEMORY;
    for (int i = 0; i < k.kids; i++)
        k.kid[i].at = k.arity * k.at + 1 + i;
    hd_desk_open(r, k.number);
    code = wait_for_verdict(&k);
    if (code && !k.reason.code) /* MPI failed, or no memory: no verdict will come */
        k.reason = (hd_reason){.why = HD_ROLL_GAVE_UP, .code = HD_ERR_TIMEOUT, .who = r->rank};
    if (k.reason.code && !r->text[0])
        hd_roll_explain(&k.reason, r->text, sizeof r->text);
    r->advised = k.reason.why == HD_ROLL_LEVELS || k.reason.why == HD_ROLL_VAIN ||
                 k.reason.why == HD_ROLL_CLOSED;
    rc = pass_down(&k);
    linger(&k);
    hd_desk_close(r, !code);
    free(k.kid);
    free(k.stray);
    free(k.stray_of);
    /* if all go on, so does this rank, and the exception is raised afterwards */
    return code && k.interrupted ? HD_ERR_INTERRUPT : code ? code : rc;
}
