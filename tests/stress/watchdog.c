/* The watchdogs of a node's ranks (hd_watchdog.c) and the page that they keep (hd_status.c), with ranks that leave, die,
 * fail, and hang while they move data.
 *
 *   watchdog SEED RANKS ROUNDS
 *
 * A rank is a thread with a session of its own, and a pipe: the others hold its reading end in place of a pidfd, and it
 * closes the writing end when it ends. All ranks run operations, in groups that they make and free. In half of the
 * rounds the watchdogs do not sleep between two looks.
 *
 * A watchdog ends the job exactly if a rank has ended without leaving, or if an operation moves data for longer than
 * its timeout and half a second; it names that rank or operation, before the rank's other threads see the death. What
 * the page says of a rank belongs together. */
#define _GNU_SOURCE
#include <string.h>
#include <unistd.h>

#include "hd_abort.h"
#include "hd_session.h"
#include "hd_status.h"
#include "hd_watchdog.h"
#include "ranks.h"

enum { STEPS = 300, TOO_LONG = 20 };
enum { STAYS, LEAVES, DIES, FAILS, HANGS };

typedef struct rank {
    hd_session s;
    int pidfd[RANKS], dead[RANKS];
    int life[2];
    int fate;
    int ended;      /* atomic: 1 it has left, 2 it has not */
    int aborted;    /* atomic: its watchdog has ended the job, with this code */
    int64_t hangs;  /* atomic, ns: since when */
} rank;

static const double HANG = 0.03; /* seconds: the timeout of who hangs */

static rank *all;
static entry *page;
static int ranks, victims, done; /* done: ranks that have made all their calls */
static uint64_t seed, round_no, wrong, aborts, operations, reports;

static int load(const int *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

static void fail(const char *what, const char *text)
{
    __atomic_add_fetch(&wrong, 1, __ATOMIC_RELAXED);
    fprintf(stderr, "round %llu: %s: %s\n", (unsigned long long)round_no, what, text);
}

/* ---- what the watchdog asks for ---- */

/* The process ends here; the rank's thread sees it at its next step. */
void hd_abort(int code, const char *why)
{
    int self, other, none = 0;
    rank *me;
    if (sscanf(why, "[hpcdist rank %d of", &self) != 1 || self < 0 || self >= ranks)
        return fail("who says this?", why);
    me = &all[self];
    if (load(&me->ended) || !__atomic_compare_exchange_n(&me->aborted, &none, code, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        return;
    __atomic_add_fetch(&aborts, 1, __ATOMIC_RELAXED);
    why = strchr(why, ']') + 1;
    if (code == 71 && sscanf(why, " rank %d", &other) == 1) {
        if (load(&all[other].ended) != 2)
            fail("that rank has not died", why);
        else if (load(&me->dead[other]))
            fail("waiting threads could print before this", why);
    } else if (code == 70) {
        const int64_t since = __atomic_load_n(&me->hangs, __ATOMIC_ACQUIRE);
        if (!since || !strstr(why, "broadcast #77 of group") || hd_now() - since < (int64_t)((HANG + 0.5) * 1e9))
            fail("nothing hangs there for so long", why);
    } else {
        fail("an unknown reason", why);
    }
}

/* ---- a rank ---- */

/* hd_session_life.c has these two, with MPI around them. */
static void adopt(hd_session *s, hd_comm *c)
{
    pthread_mutex_lock(&s->mu);
    c->next = s->comms;
    s->comms = c;
    pthread_mutex_unlock(&s->mu);
}

static void forget(hd_session *s)
{
    hd_comm *c;
    pthread_mutex_lock(&s->mu);
    c = s->comms;
    s->comms = c->next;
    pthread_mutex_unlock(&s->mu);
    free(c->node_slot);
    free(c);
}

static void make_group(rank *me)
{
    hd_comm *c = calloc(1, sizeof *c);
    c->node_slot = calloc((size_t)ranks, sizeof *c->node_slot); /* all are on this node */
    for (int r = 0; r < ranks; r++)
        c->node_slot[r] = r;
    snprintf(c->name, sizeof c->name, "stress");
    c->session = &me->s;
    c->rank = me->s.rank;
    c->size = ranks;
    adopt(&me->s, c);
}

static void look_at(rank *me, int slot)
{
    char buffer[HD_TEXT];
    unsigned number, line;
    hd_text t;
    hd_text_init(&t, buffer, sizeof buffer);
    hd_session_report(&me->s, slot, &t);
    if (sscanf(buffer, "is in all_reduce #%u of group 'stress' at line %u for", &number, &line) == 2 && number != line)
        fail("two calls in one", buffer);
    __atomic_add_fetch(&reports, 1, __ATOMIC_RELAXED);
}

static void operate(rank *me, chance *luck, uint32_t seq)
{
    hd_comm *c = me->s.comms;
    hd_job j;
    hd_job_init(&j, c, HD_ALL_REDUCE, "all_reduce");
    j.seq = seq;
    j.timeout = 40 + (double)draw(luck, 40);
    j.begun = draw(luck, 2) ? hd_now() : 0;
    snprintf(j.site, sizeof j.site, "line %u", seq);
    hd_session_enter(&me->s, &j);
    if (draw(luck, 2))
        hd_session_note(&me->s, &j);
    hd_data_begin(c, &j);
    if (draw(luck, 40) == 0)
        nap_us((long)draw(luck, 300));
    hd_data_end(c);
    hd_session_leave(&me->s);
    hd_job_clear(&j);
    __atomic_add_fetch(&operations, 1, __ATOMIC_RELAXED);
}

static void hang(rank *me)
{
    hd_comm *c = me->s.comms;
    hd_job j;
    hd_job_init(&j, c, HD_BROADCAST, "broadcast");
    j.seq = 77;
    j.timeout = HANG;
    __atomic_store_n(&me->hangs, hd_now(), __ATOMIC_RELEASE);
    hd_session_enter(&me->s, &j);
    hd_data_begin(c, &j);
    hd_job_clear(&j);
}

/* Until the watchdog has ended this process, or nobody dies and all have made their calls. */
static void stay(rank *me)
{
    const int64_t until = hd_now() + (int64_t)TOO_LONG * 1000000000;
    while (!load(&me->aborted)) {
        if (!victims && load(&done) == ranks)
            return;
        if (hd_now() > until)
            return fail("nobody has ended this process", me->fate == HANGS ? "it hangs" : "a rank has died");
        nap_us(200);
    }
}

static void end(rank *me, int left)
{
    if (left)
        hd_session_set_leaving(&me->s);
    __atomic_store_n(&me->ended, left ? 1 : 2, __ATOMIC_RELEASE);
    close(me->life[1]);
}

static void *rank_main(void *arg)
{
    rank *me = &all[(intptr_t)arg];
    chance luck = chance_of(seed, round_no * RANKS + (uint64_t)me->s.rank);
    const uint64_t steps = draw(&luck, STEPS);
    make_group(me);
    for (uint32_t i = 1; i <= steps && !load(&me->aborted); i++) {
        operate(me, &luck, i);
        look_at(me, (int)draw(&luck, (uint64_t)ranks));
        if (draw(&luck, 8) == 0) {
            make_group(me);
            if (me->s.comms->next->next)
                forget(&me->s);
        }
    }
    __atomic_add_fetch(&done, 1, __ATOMIC_ACQ_REL);
    if (me->fate == FAILS)
        hd_session_set_failing(&me->s, "ValueError: stress");
    if (me->fate == HANGS)
        hang(me);
    if (me->fate == STAYS || me->fate == HANGS)
        stay(me);
    end(me, !load(&me->aborted) && (me->fate == LEAVES || me->fate == STAYS));
    return NULL;
}

/* ---- a round ---- */

static void begin(rank *me, int self, int fate)
{
    memset(me, 0, sizeof *me);
    me->fate = fate;
    me->s = (hd_session){.rank = self, .size = ranks, .node_n = ranks, .slot = self, .page = page,
                         .pidfd = me->pidfd, .dead = me->dead};
    pthread_mutex_init(&me->s.mu, NULL);
    page[self] = (entry){.state = RUNNING, .pid = 1000 + (uint32_t)self, .world_rank = (uint32_t)self,
                         .beat = hd_uptime(), .since = hd_uptime()};
    if (pipe(me->life)) {
        perror("pipe");
        exit(2);
    }
}

static void one_round(void)
{
    chance luck = chance_of(seed, round_no * RANKS + 7777);
    const int deaths = draw(&luck, 3) == 0, awake = (int)draw(&luck, 2);
    victims = done = 0;
    for (int r = 0; r < ranks; r++) {
        int fate = draw(&luck, 2) ? STAYS : LEAVES;
        if (deaths && draw(&luck, (uint64_t)ranks) == 0)
            fate = draw(&luck, 2) ? DIES : FAILS;
        if (round_no % 16 == 0 && r == 0)
            fate = HANGS;
        victims += fate > LEAVES;
        begin(&all[r], r, fate);
    }
    for (int r = 0; r < ranks; r++) {
        for (int i = 0; i < ranks; i++)
            all[r].pidfd[i] = i == r ? NO_PIDFD : all[i].life[0];
        hd_watchdog_start(&all[r].s);
        if (awake && write(all[r].s.wake[1], "x", 1) != 1)
            fail("no byte for the watchdog", "");
    }
    if (run_threads(ranks, rank_main))
        exit(2);
    for (int r = 0; r < ranks; r++) {
        hd_watchdog_stop(&all[r].s);
        if (all[r].aborted && !victims)
            fail("a watchdog has ended the job", "nobody has died");
        while (all[r].s.comms)
            forget(&all[r].s);
        pthread_mutex_destroy(&all[r].s.mu);
    }
    for (int r = 0; r < ranks; r++)
        close(all[r].life[0]);
}

int main(int argc, char **argv)
{
    uint64_t rounds;
    if (argc != 4 || (ranks = atoi(argv[2])) < 2 || ranks > RANKS) {
        fprintf(stderr, "usage: watchdog SEED RANKS ROUNDS\n");
        return 2;
    }
    seed = strtoull(argv[1], NULL, 10);
    rounds = strtoull(argv[3], NULL, 10);
    all = calloc((size_t)ranks, sizeof *all);
    page = shared_memory((size_t)ranks * sizeof *page);
    for (; round_no < rounds && !wrong; round_no++)
        one_round();
    free(all);
    printf("%d ranks, %llu rounds, %llu operations, %llu reports, %llu times ended, %llu wrong\n", ranks,
           (unsigned long long)round_no, (unsigned long long)operations, (unsigned long long)reports,
           (unsigned long long)aborts, (unsigned long long)wrong);
    return wrong ? 1 : 0;
}
