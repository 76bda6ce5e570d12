/* The entry check of the ranks of a node (hd_check.c, hd_page.c) and the data that it carries (hd_carry.c,
 * hd_page_pairs.c), with ranks that stop anywhere, time out, retry, disagree and refuse.
 *
 *   check SEED processes|threads RANKS CHECKS START
 *
 * Each rank makes the same CHECKS calls in order, in rounds after which the outcomes are compared. A call is a sum of
 * 8, 64 or 1024 bytes, an all_gather, or an all_to_all of sizes that differ from pair to pair. START is the number before the first check: near 2^32 it wraps.
 *
 * For each check either all ranks that return a result return the right one, or every rank returns an error. A rank
 * whose signal handler raised returns neither. */
#define _GNU_SOURCE
#include <string.h>

#include "hd_carry.h"
#include "hd_check.h"
#include "hd_check_mpi.h"
#include "hd_kernels.h"
#include "hd_page.h"
#include "hd_threads.h"
#include "ranks.h"
#include "sums.h"

enum { PER_ROUND = 2000 };
enum { NOTHING, RESULT, ERROR, RAISED };
enum { SUM_8, SUM_64, SUM_1024, GATHER, EXCHANGE, FORMS };

typedef struct world {
    meeting between;
    int ranks, threads;
    uint32_t start;
    uint64_t seed, wanted, done, failed, raised, wrong;
    uint8_t outcome[PER_ROUND][RANKS];
    uint8_t must_fail[PER_ROUND][RANKS];
    int over;
} world;

static world *w;
static void *page;
static __thread chance luck;
static __thread int self;

/* ---- what the engine asks for ---- */

static void stumble(uint64_t one_in)
{
    if (draw(&luck, one_in) == 0)
        nap_us((long)draw(&luck, 3000));
}

static void add(const void *one, const void *other, void *result, int64_t n)
{
    stumble(5000);
    add_up(one, other, result, n);
}

int hd_scale_mul(void *to, const void *from, int64_t n, int dtype, double factor)
{
    return (void)to, (void)from, (void)n, (void)dtype, (void)factor, 1;
}
int hd_scale_div(void *p, int64_t n, int dtype, int64_t by) { return (void)p, (void)n, (void)dtype, (void)by, 1; }
hd_reduce_fn hd_reduce_kernel(int op, int dtype) { return (void)op, (void)dtype, add; }
void hd_session_progress(hd_session *s) { (void)s, stumble(200); }
int hd_check_mpi(hd_comm *c, hd_job *j, uint64_t hash) { return (void)c, (void)j, (void)hash, HD_ERR_BACKEND; }

/* A handler that raises, now and then; looked at after 50 ms. */
static int raises(hd_job *j) { return (void)j, draw(&luck, 3) == 0; }

/* ---- a rank ---- */

typedef struct call {
    int form;
    int64_t own[128], data[128];
    hd_seg in[RANKS], out[RANKS];
} call;

static int64_t sum_of(int form) { return form == SUM_8 ? 1 : form == SUM_64 ? 8 : 128; }

/* Elements that a rank sends to another in an exchange. */
static int64_t between(int from, int to) { return (from + 2 * to) % 4; }

static void prepare(call *x, hd_job *j, int64_t op)
{
    int64_t *in = x->own, *out = x->data;
    memset(x->data, 0, sizeof x->data);
    j->in = x->in;
    j->out = x->out;
    j->nin = j->nout = 1;
    x->in[0] = (hd_seg){.ptr = (char *)in, .n = 8};
    x->out[0] = (hd_seg){.ptr = (char *)out, .n = 8 * w->ranks};
    if (x->form < GATHER) { /* in place, or of an input apart from the output */
        j->nin = (op + self) % 3 == 0;
        x->in[0].n = x->out[0].n = j->count = sum_of(x->form);
        contribute(j->nin ? in : out, op, self, j->count);
    } else if (x->form == GATHER) {
        contribute(in, op, self, j->count = 8);
    } else {
        j->pairwise = j->uneven = 1;
        j->nin = j->nout = w->ranks;
        for (int r = 0; r < w->ranks; r++) {
            contribute(in, op + r, self, between(self, r));
            x->in[r] = (hd_seg){.ptr = (char *)in, .n = between(self, r)};
            x->out[r] = (hd_seg){.ptr = (char *)out, .n = between(r, self)};
            in += between(self, r);
            out += between(r, self);
        }
    }
}

/* Whether the outputs have what they must. */
static int arrived(const call *x, int64_t op)
{
    int64_t want[8];
    if (x->form < GATHER)
        return right(x->data, op, w->ranks, sum_of(x->form), 1);
    for (int r = 0; r < w->ranks; r++) {
        const int64_t n = x->form == GATHER ? 8 : x->out[r].n;
        contribute(want, x->form == GATHER ? op : op + self, r, n);
        if (memcmp(x->form == GATHER ? (const char *)(x->data + 8 * r) : x->out[r].ptr, want, (size_t)n * 8))
            return 0;
    }
    return 1;
}

/* `form`, `patient` and the fingerprint are the same on all ranks; what is drawn from `luck` is not. */
static int operate(hd_comm *c, int64_t op, int at, int form, int patient)
{
    static const int kinds[] = {HD_ALL_REDUCE, HD_ALL_REDUCE, HD_ALL_REDUCE, HD_ALL_GATHER, HD_ALL_TO_ALL};
    call x = {.form = form};
    hd_carry carry;
    hd_job j;
    uint64_t hash = (uint64_t)op;
    int rc;
    hd_job_init(&j, c, kinds[form], "a call");
    j.dtype = HD_INT64;
    j.redop = form < GATHER ? HD_SUM : -1;
    j.timeout = patient ? 0.2 : 0.0005 * (double)(1 + draw(&luck, 5));
    j.inline_ = 1;
    j.seq = (uint32_t)op;
    prepare(&x, &j, op);
    j.checked.carry = hd_carries(c, &j, &carry) ? &carry : NULL;
    if (draw(&luck, 2000) == 0)
        j.refusal.why = "ValueError: this rank does not like it";
    else if (draw(&luck, 2000) == 0)
        hash += 1 + (uint64_t)self; /* two ranks that disagree do not agree with each other */
    if (j.refusal.why || hash != (uint64_t)op)
        w->must_fail[at][self] = 1;
    stumble(3000);
    if (patient && draw(&luck, 2000) == 0) /* so late that the others look at their signals */
        nap_us(60000 + (long)draw(&luck, 60000));
    rc = hd_check(c, &j, hash);
    if (j.code == HD_ERR_INTERRUPT)
        rc = RAISED;
    else
        rc = rc || j.refusal.why ? ERROR : RESULT;
    if (rc == RESULT && (!j.checked.carried || !arrived(&x, op))) {
        __atomic_add_fetch(&w->wrong, 1, __ATOMIC_RELAXED);
        fprintf(stderr, "rank %d: the data of check %lld, form %d, is wrong\n", self, (long long)op, form);
    }
    j.in = &j.in1;
    j.out = &j.out1;
    hd_job_clear(&j);
    return rc;
}

static void compare(uint64_t before)
{
    for (int at = 0; at < PER_ROUND; at++) {
        int seen = 0, must_fail = 0;
        for (int r = 0; r < w->ranks; r++) {
            seen |= 1 << w->outcome[at][r];
            must_fail |= w->must_fail[at][r];
            w->raised += w->outcome[at][r] == RAISED;
        }
        w->failed += (seen & 1 << ERROR) != 0;
        if ((seen & 1 << RESULT && (seen & 1 << ERROR || must_fail)) || seen & 1 << NOTHING) {
            static const char *const names[] = {"nothing", "a result", "an error", "an exception"};
            fprintf(stderr, "check %llu:%s", (unsigned long long)before + (unsigned)at, must_fail ? " (must fail)" : "");
            for (int r = 0; r < w->ranks; r++)
                fprintf(stderr, "%s rank %d got %s", r ? "," : "", r, names[w->outcome[at][r]]);
            fprintf(stderr, "\n");
            w->wrong++;
            return;
        }
    }
}

static void *rank_main(void *arg)
{
    static int slots[RANKS];
    hd_comm c = {.name = "stress", .check = 1, .size = w->ranks, .node_slot = slots, .page = page};
    chance all = chance_of(w->seed, 100);
    int64_t op = 0;

    self = c.rank = (int)(intptr_t)arg;
    c.check_seq = c.decided = w->start;
    luck = chance_of(w->seed, (uint64_t)self);
    while (!__atomic_load_n(&w->over, __ATOMIC_ACQUIRE)) {
        const int patient = draw(&all, 10) == 0;
        for (int at = 0; at < PER_ROUND; at++, op++)
            w->outcome[at][self] = (uint8_t)operate(&c, op, at, (int)draw(&all, FORMS), patient);
        meet(&w->between, (uint32_t)w->ranks);
        if (self == 0) {
            compare(w->done);
            w->done += PER_ROUND;
            memset(w->outcome, 0, sizeof w->outcome);
            memset(w->must_fail, 0, sizeof w->must_fail);
            __atomic_store_n(&w->over, w->done >= w->wanted || w->wrong, __ATOMIC_RELEASE);
        }
        meet(&w->between, (uint32_t)w->ranks);
    }
    return NULL;
}

/* ---- the whole ---- */

int main(int argc, char **argv)
{
    int bad;
    if (argc != 6 || atoi(argv[3]) < 2 || atoi(argv[3]) > RANKS) {
        fprintf(stderr, "usage: check SEED processes|threads RANKS CHECKS START\n");
        return 2;
    }
    w = shared_memory(sizeof *w);
    w->seed = strtoull(argv[1], NULL, 10);
    w->threads = strcmp(argv[2], "threads") == 0;
    w->ranks = atoi(argv[3]);
    w->wanted = strtoull(argv[4], NULL, 10);
    w->start = (uint32_t)strtoull(argv[5], NULL, 0);
    page = shared_memory(hd_page_size(w->ranks));
    for (int r = 0; r < w->ranks; r++) /* as if START checks had been decided */
        ((hd_page *)page)->slots[r].word = (uint64_t)w->start << 32 | 1u << 31 | ((w->start - 1) & 0x7fffffff);
    hd_py.slow = raises;
    bad = w->threads ? run_threads(w->ranks, rank_main)
                     : run_processes(w->ranks, w->seed, &w->over, rank_main);
    printf("%d ranks, %llu checks, %llu failed, %llu exceptions, %llu wrong or mixed\n", w->ranks,
           (unsigned long long)w->done, (unsigned long long)w->failed, (unsigned long long)w->raised,
           (unsigned long long)w->wrong);
    return bad || w->wrong ? 1 : 0;
}
