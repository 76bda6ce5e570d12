/* The all_reduce through a node's memory (hd_node_reduce.c), and of tensors that lie in it (hd_direct.c), and the moves of blocks through its slots (hd_slots.c), with ranks that stop anywhere and time out.
 *
 *   node SEED processes|threads RANKS OPERATIONS
 *
 * The ranks reduce and move tensors of random lengths in rounds; a round ends when the memory is given up, and begins with
 * new memory. Ranks are delayed inside of an operation: processes by SIGSTOP, threads by naps in the middle of a
 * piece. In half of the rounds they meet before each operation, as the entry check makes them; in the others, as
 * without the check, they do not.
 *
 * For each operation either all ranks got the right numbers, or all got an error; and whether the group takes MPI
 * from then on is what all of them say. */
#define _GNU_SOURCE
#include <string.h>

#include "hd_block.h"
#include "hd_direct.h"
#include "hd_job.h"
#include "hd_kernels.h"
#include "hd_node.h"
#include "hd_node_reduce.h"
#include "hd_page.h"
#include "hd_shared.h"
#include "hd_slots.h"
#include "hd_threads.h"
#include "ranks.h"
#include "sums.h"

enum { PER_ROUND = 400, LONGEST = 8192, ROOM = LONGEST + 64 * RANKS, SEGMENT = 8 << 20 };
enum { NOTHING, RIGHT, ERROR, BY_MPI };
enum { SLOTS = 2048 }; /* numbers: shorter ones do not go through hd_slots.c where ranks take turns */

typedef struct world {
    meeting between, before;
    int ranks, threads;
    uint64_t seed, wanted, done, broken, wrong;
    uint8_t outcome[PER_ROUND][RANKS];
    int over;
} world;

static world *w;
static char *segment;
static int64_t *arena; /* tensors that the others read and write: ROOM numbers of each rank */
static __thread chance luck;
static __thread int self;

/* ---- what the engine asks for ---- */

int hd_share(MPI_Comm node, size_t bytes, void **out)
{
    (void)node;
    *out = bytes <= SEGMENT ? segment : NULL;
    return 0;
}

int MPI_Allreduce(const void *in, void *out, int n, MPI_Datatype type, MPI_Op op, MPI_Comm comm)
{
    return (void)in, (void)out, (void)n, (void)type, (void)op, (void)comm, 0;
}

static void stumble(void)
{
    if (w->threads && draw(&luck, 300) == 0)
        nap_us((long)draw(&luck, 4000));
}

static void add(const void *one, const void *other, void *result, int64_t n)
{
    stumble();
    add_up(one, other, result, n);
}

hd_reduce_fn hd_reduce_kernel(int op, int dtype) { return (void)op, (void)dtype, add; }
int hd_scale_mul(void *dst, const void *src, int64_t n, int dtype, double factor)
{
    (void)dtype;
    stumble();
    for (int64_t i = 0; i < n; i++)
        ((int64_t *)dst)[i] = (int64_t)factor * ((const int64_t *)src)[i];
    return 0;
}
int hd_scale_div(void *p, int64_t n, int dtype, int64_t by)
{
    (void)dtype;
    stumble();
    for (int64_t i = 0; i < n; i++)
        ((int64_t *)p)[i] /= by;
    return 0;
}
void hd_session_progress(hd_session *s)
{
    (void)s;
    stumble();
}

int hd_block_find(const hd_comm *c, const char *at, int64_t bytes, hd_spot *out)
{
    (void)bytes;
    *out = (hd_spot){1, at - (char *)(arena + (int64_t)ROOM * c->rank)};
    return 1;
}
char *hd_block_at(const hd_comm *c, int rank, hd_spot spot)
{
    (void)c;
    stumble();
    return (char *)(arena + (int64_t)ROOM * rank) + spot.at;
}
void hd_block_detach(hd_comm *c, hd_spot spot) { (void)c, (void)spot; }

/* A handler that raises, now and then; looked at after 50 ms. */
static int raises(hd_job *j) { return (void)j, draw(&luck, 4) == 0; }

/* ---- a rank ---- */

static void begin(hd_job *j, hd_comm *c, int kind, const char *name, int op, int64_t n, double timeout)
{
    hd_job_init(j, c, kind, name);
    j->dtype = HD_INT64;
    j->redop = HD_SUM;
    j->count = n;
    j->timeout = timeout;
    j->inline_ = 1;
    j->seq = (uint32_t)op + 1;
}

static void wrong(const char *name, int op, int64_t n)
{
    __atomic_add_fetch(&w->wrong, 1, __ATOMIC_RELAXED);
    fprintf(stderr, "rank %d: %s %d of %lld elements is wrong\n", self, name, op, (long long)n);
}

/* A reduce of hd_node_reduce.c: only the root's numbers change. One in two multiplies them first. */
static int reduce(hd_comm *c, int op, int64_t n, double timeout, int64_t *data)
{
    const int root = op % w->ranks, scaled = op / w->ranks % 2;
    hd_job j;
    int takes, rc;
    begin(&j, c, HD_REDUCE, "reduce", op, n, timeout);
    j.root = root;
    j.redop = scaled ? HD_PREMUL_SUM : HD_SUM;
    j.factor = 3;
    takes = hd_node_ready(c, &j);
    if (takes > 0)
        contribute(data, op, self, n);
    rc = takes > 0 ? hd_node_reduce(c, &j, (char *)data, self == root ? (char *)data : NULL, n) : takes;
    hd_job_clear(&j);
    for (int64_t i = 0; takes > 0 && i < n && (self != root || !rc); i++)
        if (data[i] != (self != root ? part(op, self, i) : total(op, w->ranks, i) * (scaled ? 3 : 1))) {
            wrong("reduce", op, n);
            break;
        }
    return rc ? ERROR : takes ? RIGHT : BY_MPI;
}

/* Lengths and timeouts are the same on all ranks: `all` is drawn alike, `luck` is not. Some ranks have
 * an input apart from the output, which lies behind it. One operation in two multiplies it first. */
static int operate(hd_comm *c, int op, int64_t n, int direct, double timeout, int64_t *data)
{
    hd_job j;
    const int apart = !direct && (op + self) % 3 == 0, factor = op % 2 ? 3 : 1;
    int64_t *from = data + (apart ? LONGEST : 0);
    int takes, rc;
    begin(&j, c, HD_ALL_REDUCE, "all_reduce", op, n, timeout);
    j.nout = 1;
    j.redop = factor > 1 ? HD_PREMUL_SUM : HD_SUM;
    j.factor = factor;
    takes = hd_node_ready(c, &j);
    /* Not before: a rank that is late may write there until all have left the round. */
    if (direct && takes > 0)
        from = data = arena + (int64_t)ROOM * self + op % 64 * (direct > 1 ? self + 1 : 0);
    j.out[0].ptr = (char *)data;
    j.out[0].n = n;
    if (takes > 0)
        contribute(from, op, self, n);
    if (apart)
        memset(data, -1, sizeof *data * (size_t)n);
    rc = takes <= 0 ? 0 : direct ? hd_direct(c, &j) : hd_node_reduce(c, &j, (char *)from, (char *)data, n);
    if (takes < 0 || rc) {
        hd_job_clear(&j);
        return ERROR;
    }
    hd_job_clear(&j);
    if (takes && !right(data, op, w->ranks, n, factor))
        wrong("all_reduce", op, n);
    return takes ? RIGHT : BY_MPI;
}

/* Numbers that one rank has for another in an operation on m per pair. */
static int64_t length(int kind, int op, int64_t m, int uneven, int from, int to)
{
    const int root = op % w->ranks;
    if ((kind == HD_GATHER && to != root) || (kind == HD_SCATTER && from != root))
        return 0;
    return uneven ? m * ((7 * from + 3 * to + op) % 5) / 4 : m;
}

/* What a rank gives lies in `data`, in the order of the ranks that it is for. */
static int64_t before(int kind, int op, int64_t m, int uneven, int from, int to)
{
    int64_t sum = 0;
    for (int q = 0; q < to && kind != HD_ALL_GATHER && kind != HD_BROADCAST && kind != HD_REDUCE; q++)
        sum += length(kind, op, m, uneven, from, q);
    return sum;
}

/* What a rank must have of number i of what is from rank `from`. */
static int64_t expected(int kind, int op, int64_t m, int uneven, int from, int64_t i)
{
    const int64_t at = before(kind, op, m, uneven, from, self) + i;
    return kind == HD_REDUCE_SCATTER || kind == HD_REDUCE ? total(op, w->ranks, at) : part(op, from, at);
}

/* Which numbers this rank gets: `taken[q]` from rank q, one behind the other. */
static int64_t portions(int kind, int op, int64_t m, int uneven, int64_t *taken)
{
    int64_t sum = 0;
    for (int q = 0; q < w->ranks; q++) {
        taken[q] = length(kind, op, m, uneven, q, self);
        if (kind == HD_REDUCE)
            taken[q] = q || self != op % w->ranks ? 0 : m * w->ranks;
        else if (kind == HD_REDUCE_SCATTER)
            taken[q] = q ? 0 : m;
        else if (kind == HD_BROADCAST)
            taken[q] = q == op % w->ranks ? m * w->ranks : 0;
        sum += taken[q];
    }
    return sum;
}

static void look(int kind, int op, int64_t m, int uneven, const int64_t *out, const int64_t *taken)
{
    for (int q = 0; q < w->ranks; q++)
        for (int64_t i = 0; i < taken[q]; i++, out++)
            if (*out != expected(kind, op, m, uneven, q, i)) {
                __atomic_add_fetch(&w->wrong, 1, __ATOMIC_RELAXED);
                fprintf(stderr, "rank %d: %s %d of %lld numbers per pair is wrong at %lld from %d\n", self,
                        hd_kind_name(kind), op, (long long)m, (long long)i, q);
                return;
            }
}

/* The lists of what this rank gives and gets, or single tensors. */
static void arrange(hd_job *j, int op, int64_t m, int uneven, int64_t *data, int64_t *out,
                    const int64_t *taken, hd_seg (*blocks)[RANKS])
{
    const int kind = j->kind, lists = kind == HD_ALL_TO_ALL, mine = self == j->root;
    const int64_t all = m * w->ranks;
    for (int q = 0; q < w->ranks; q++) {
        blocks[0][q] = (hd_seg){.ptr = (char *)(data + before(kind, op, m, uneven, self, q)),
                                .n = length(kind, op, m, uneven, self, q)};
        blocks[1][q] = (hd_seg){.ptr = (char *)out, .n = taken[q]};
        out += taken[q];
    }
    out = (int64_t *)blocks[1][0].ptr;
    j->in[0] = (hd_seg){.ptr = (char *)data, .n = kind == HD_ALL_GATHER ? m : all};
    j->out[0] = (hd_seg){.ptr = (char *)out, .n = kind == HD_REDUCE_SCATTER ? m : all};
    j->nin = j->nout = 1;
    if (kind == HD_GATHER)
        j->in[0] = blocks[0][j->root];
    if (kind == HD_SCATTER)
        j->out[0] = blocks[1][j->root];
    if (lists || (kind == HD_SCATTER && mine)) {
        j->in = blocks[0];
        j->nin = w->ranks;
    }
    if (lists || (kind == HD_GATHER && mine)) {
        j->out = blocks[1];
        j->nout = w->ranks;
    }
}

/* What the entry check says where sizes differ. */
static void measure(hd_job *j, int op, int64_t m)
{
    for (int from = 0; from < w->ranks && j->uneven; from++)
        for (int to = 0; to < w->ranks; to++) {
            const int64_t n = length(j->kind, op, m, 1, from, to);
            j->checked.longest = n > j->checked.longest ? n : j->checked.longest;
            j->checked.total += n;
        }
    j->checked.verified = j->uneven;
}

/* One operation of hd_slots.c, on n numbers in all. */
static int move(hd_comm *c, int kind, int op, int64_t n, int uneven, double timeout, int64_t *data,
                int64_t *out)
{
    const int64_t m = n / w->ranks;
    int64_t taken[RANKS], sum;
    hd_seg blocks[2][RANKS];
    int outcome = BY_MPI, takes;
    hd_job j;
    begin(&j, c, kind, hd_kind_name(kind), op, n, timeout);
    j.root = op % w->ranks;
    j.pairwise = kind >= HD_GATHER;
    j.uneven = uneven &= j.pairwise;
    sum = portions(kind, op, m, uneven, taken);
    measure(&j, op, m);
    if (uneven && j.checked.total < SLOTS) { /* goes through MPI, and leaves the memory as it is */
        hd_job_clear(&j);
        return RIGHT;
    }
    contribute(data, op, self, kind == HD_ALL_GATHER ? m : m * w->ranks);
    memset(out, 0xa5, sizeof *out * (size_t)sum);
    if (kind == HD_BROADCAST && self == j.root)
        memcpy(out, data, sizeof *out * (size_t)sum);
    arrange(&j, op, m, uneven, data, out, taken, blocks);
    if ((takes = hd_slots_takes(c, &j)))
        outcome = takes < 0 || hd_slots(c, &j) ? ERROR : RIGHT;
    j.in = &j.in1;
    j.out = &j.out1;
    hd_job_clear(&j);
    if (outcome == RIGHT)
        look(kind, op, m, uneven, out, taken);
    return outcome;
}

static void compare(int rounds)
{
    for (int op = 0; op < PER_ROUND; op++)
        for (int r = 1; r < w->ranks; r++)
            if (w->outcome[op][r] != w->outcome[op][0]) {
                static const char *const names[] = {"nothing", "the result", "an error", "a turn to MPI"};
                fprintf(stderr, "round %d, operation %d: rank 0 got %s, rank %d %s\n", rounds, op,
                        names[w->outcome[op][0]], r, names[w->outcome[op][r]]);
                w->wrong++;
                return;
            }
}

static void one_round(hd_comm *c, chance *all, int rounds, int64_t *data)
{
    static const int moves[14] = {HD_REDUCE, HD_REDUCE_SCATTER, HD_BROADCAST, HD_ALL_GATHER,
                                  HD_GATHER, HD_SCATTER, HD_ALL_TO_ALL};
    const int checked = (int)draw(all, 2), patient = draw(all, 60) == 0;
    const int64_t piece = 4096 * (w->ranks + (int64_t)draw(all, 4));
    int op;
    c->node_limit = 4096 + 2 * w->ranks * piece;
    for (op = 0; op < PER_ROUND; op++) {
        const int64_t n = 512 + (int64_t)draw(all, draw(all, 8) ? 512 : LONGEST - 512);
        const int direct = (int)draw(all, 4); /* 2, 3: at another place on each rank */
        const double timeout = patient ? 0.15 : 0.0005 * (double)(1 + draw(all, 5));
        const int drawn = moves[draw(all, 14)], uneven = (int)draw(all, 2); /* in half of the cases none */
        const int slices = drawn == HD_REDUCE && (w->ranks > 2 || direct > 1);
        if (checked)
            meet(&w->before, (uint32_t)w->ranks);
        w->outcome[op][self] =
            (uint8_t)(!drawn   ? operate(c, op, n, direct, timeout, data)
                      : slices ? reduce(c, op, n, timeout, data)
                               : move(c, drawn, op, n < SLOTS ? n + SLOTS : n, uneven, timeout, data, data + LONGEST));
        if (w->outcome[op][self] == BY_MPI)
            break;
    }
    meet(&w->between, (uint32_t)w->ranks);
    if (self == 0) {
        compare(rounds);
        w->done += (uint64_t)op;
        w->broken += op < PER_ROUND;
        w->over = w->done >= w->wanted || w->wrong;
        memset(w->outcome, 0, sizeof w->outcome);
        memset(segment, 0, 4096 * 4);
    }
    free(c->node); /* the memory itself stays */
    c->node = NULL;
    c->node_asked = 0;
    meet(&w->between, (uint32_t)w->ranks);
}

static void *rank_main(void *arg)
{
    static int slots[RANKS];
    hd_comm c = {.name = "stress", .check = 1, .size = w->ranks, .node_slot = slots, .page = (void *)segment};
    int64_t *data = malloc(sizeof(int64_t) * 2 * LONGEST);
    chance all = chance_of(w->seed, 100);

    self = c.rank = (int)(intptr_t)arg;
    luck = chance_of(w->seed, (uint64_t)self);
    for (int rounds = 0; !w->over; rounds++)
        one_round(&c, &all, rounds, data);
    free(data);
    return NULL;
}

/* ---- the whole ---- */

int main(int argc, char **argv)
{
    int bad;
    if (argc != 5 || atoi(argv[3]) < 2 || atoi(argv[3]) > RANKS) {
        fprintf(stderr, "usage: node SEED processes|threads RANKS OPERATIONS\n");
        return 2;
    }
    w = shared_memory(sizeof *w);
    segment = shared_memory(SEGMENT);
    arena = shared_memory(sizeof(int64_t) * ROOM * RANKS);
    w->seed = strtoull(argv[1], NULL, 10);
    w->threads = strcmp(argv[2], "threads") == 0;
    w->ranks = atoi(argv[3]);
    w->wanted = strtoull(argv[4], NULL, 10);
    hd_py.slow = raises;
    bad = w->threads ? run_threads(w->ranks, rank_main)
                     : run_processes(w->ranks, w->seed, &w->over, rank_main);
    printf("%d ranks, %llu operations, %llu times given up, %llu wrong or mixed\n", w->ranks,
           (unsigned long long)w->done, (unsigned long long)w->broken, (unsigned long long)w->wrong);
    return bad || w->wrong ? 1 : 0;
}
