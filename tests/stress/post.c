/* The entry check of ranks on several nodes (hd_check_mpi.c, hd_rounds.c, hd_post.c, hd_here.c) and the letters that
 * carry its data (hd_ballot.c, hd_carry.c), with ranks that are late, stop anywhere, time out, retry, disagree and refuse.
 *
 *   post SEED RANKS CHECKS       by chance
 *   post SEED RANKS CHECKS EACH  the same, with so many ranks on each node (hd_caucus.c)
 *   post late RANKS              one call for which rank 1 is late: the messages of one rank
 *   post absent RANKS            one call without rank 1: whom do the others name, at what cost
 *
 * Messages take a random while, and keep their order between two ranks. How a check may end is in outcomes.h. */
#include <pthread.h>
#include <string.h>

#include "hd_ballot.h"
#include "hd_carry.h"
#include "hd_caucus.h"
#include "hd_caucus_life.h"
#include "hd_check_mpi.h"
#include "hd_comm.h"
#include "hd_data.h"
#include "hd_job.h"
#include "hd_kernels.h"
#include "hd_post.h"
#include "hd_report.h"
#include "hd_threads.h"
#include "letters.h"
#include "mail.h"
#include "outcomes.h"

enum { ROUNDS = 512, STUCK_S = 25 };

static struct hd_hall *halls[MOST]; /* of the nodes */
static uint64_t seed, wanted;
static meeting between;
static int over;

/* ---- requests ---- */

enum { ALL, SPEAKERS };

/* What all ranks quote when they disagree. */
typedef struct quotes {
    pthread_mutex_t mu;
    uint64_t number; /* counted from 1 */
    int came, crippled;
    char *texts;
} quotes;

static quotes quoted[ROUNDS];
static uint64_t released; /* those up to this one end for all */
static __thread uint64_t made;
static __thread MPI_Request open_[8 * BETWEEN]; /* quotes that this rank has begun */
static __thread int opened;

struct stub_request {
    uint64_t number; /* of quotes; 0: a receive */
    char *data;
    int n, from, tag;
    int64_t told; /* ns: when its rank learns that all have quoted; 0: they have not */
};

/* The ranks that speak are the first ones of their nodes. */
static int world_rank(MPI_Comm comm, int rank) { return comm == SPEAKERS ? rank * each : rank; }
int MPI_Iprobe(int from, int tag, MPI_Comm comm, int *flag, MPI_Status *st)
{
    (void)from, (void)tag, (void)comm, (void)st;
    return *flag = 0, MPI_SUCCESS; /* no rank destroys the group */
}

int MPI_Comm_rank(MPI_Comm comm, int *rank) { return *rank = comm == SPEAKERS ? me / each : me, MPI_SUCCESS; }
int MPI_Comm_size(MPI_Comm comm, int *size)
{
    *size = comm == SPEAKERS ? (ranks + each - 1) / each : ranks;
    return MPI_SUCCESS;
}

int MPI_Irecv(void *data, int n, MPI_Datatype type, int from, int tag, MPI_Comm comm, MPI_Request *req)
{
    (void)type;
    *req = calloc(1, sizeof **req);
    **req = (struct stub_request){.data = data, .n = n, .from = world_rank(comm, from), .tag = tag};
    return MPI_SUCCESS;
}

int MPI_Iallgather(const void *in, int n, MPI_Datatype type, void *out, int m, MPI_Datatype of, MPI_Comm comm,
                   MPI_Request *req)
{
    const uint64_t number = ++made;
    quotes *q = &quoted[number % ROUNDS];
    (void)type, (void)m, (void)of, (void)comm;
    /* Whatever this rank has begun and not seen the end of is left behind. */
    for (int i = 0; i < opened; i++)
        __atomic_store_n(&quoted[open_[i]->number % ROUNDS].crippled, 1, __ATOMIC_RELEASE);
    pthread_mutex_lock(&q->mu);
    if (q->number != number) {
        q->number = number;
        q->came = 0;
        __atomic_store_n(&q->crippled, 0, __ATOMIC_RELEASE);
        q->texts = realloc(q->texts, (size_t)n * (size_t)ranks);
    }
    memcpy(q->texts + (size_t)me * (size_t)n, in, (size_t)n);
    q->came++;
    pthread_mutex_unlock(&q->mu);
    *req = calloc(1, sizeof **req);
    **req = (struct stub_request){.number = number, .data = out, .n = n};
    open_[opened++] = *req;
    return MPI_SUCCESS;
}

static int all_quoted(struct stub_request *q)
{
    quotes *of = &quoted[q->number % ROUNDS];
    int ended;
    if (q->number <= __atomic_load_n(&released, __ATOMIC_ACQUIRE))
        return 1;
    pthread_mutex_lock(&of->mu);
    ended = of->came == ranks && !__atomic_load_n(&of->crippled, __ATOMIC_ACQUIRE);
    pthread_mutex_unlock(&of->mu);
    if (ended && !q->told)
        q->told = hd_now() + (int64_t)(slow_post && !draw(&luck, 8) ? draw(&luck, 8000000) : 0);
    return ended && hd_now() >= q->told;
}

static void read_quotes(struct stub_request *q)
{
    quotes *of = &quoted[q->number % ROUNDS];
    pthread_mutex_lock(&of->mu);
    if (of->number == q->number)
        memcpy(q->data, of->texts, (size_t)q->n * (size_t)ranks);
    pthread_mutex_unlock(&of->mu);
    for (int i = 0; i < opened; i++)
        if (open_[i] == q)
            open_[i] = open_[--opened];
}

int MPI_Test(MPI_Request *req, int *flag, MPI_Status *st)
{
    struct stub_request *q = *req;
    MPI_Message message;
    *flag = 1;
    if (q == MPI_REQUEST_NULL)
        return MPI_SUCCESS;
    if (q->number) {
        if ((*flag = all_quoted(q)))
            read_quotes(q);
    } else {
        MPI_Improbe(q->from, q->tag, ALL, flag, &message, st);
        if (*flag)
            MPI_Mrecv(q->data, q->n, MPI_BYTE, &message, st);
    }
    if (*flag) {
        free(q);
        *req = MPI_REQUEST_NULL;
    }
    return MPI_SUCCESS;
}

/* Of sends, all of which have gone. */
int MPI_Testall(int n, MPI_Request *req, int *flag, MPI_Status *st)
{
    (void)st;
    *flag = 1;
    for (int i = 0; i < n; i++)
        *flag &= req[i] == MPI_REQUEST_NULL;
    return MPI_SUCCESS;
}

int MPI_Comm_dup(MPI_Comm comm, MPI_Comm *copy) { return *copy = comm, MPI_SUCCESS; }
int MPI_Comm_free(MPI_Comm *comm) { return (void)comm, MPI_SUCCESS; }
int MPI_Comm_set_errhandler(MPI_Comm comm, int handler) { return (void)comm, (void)handler, MPI_SUCCESS; }

/* ---- what the engine asks for ---- */

static __thread int watched; /* by the watchdog: never in a call's end, nor twice */
void hd_votes_begin(hd_comm *c, hd_job *j) { (void)c, (void)j, watched++; }
void hd_data_end(hd_comm *c) { (void)c, watched--; }
void hd_caucus_free(hd_caucus *k) { (void)k; }
hd_reduce_fn hd_reduce_kernel(int op, int dtype) { return (void)op, (void)dtype, add_up; }
int hd_scale_mul(void *to, const void *from, int64_t n, int dtype, double factor)
{
    return (void)to, (void)from, (void)n, (void)dtype, (void)factor, 1;
}
int hd_scale_div(void *p, int64_t n, int dtype, int64_t by) { return (void)p, (void)n, (void)dtype, (void)by, 1; }

/* A handler that raises, now and then; looked at after 50 ms. */
static int raises(hd_job *j) { return (void)j, slow_post && draw(&luck, 20) == 0; }

/* ---- a rank ---- */

/* The fingerprint and `patience` are the same on all ranks; what is drawn from `luck` is not. */
static int check(hd_comm *c, uint64_t op, int at, double patience, char *text)
{
    uint64_t hash = hd_mix(op, 7);
    call x;
    hd_job j;
    int rc;
    hd_job_init(&j, c, HD_ALL_REDUCE, "a call");
    j.timeout = patience;
    prepare(&x, &j, (int64_t)op);
    j.inline_ = 1;
    j.seq = (uint32_t)op;
    if (slow_post && draw(&luck, 400) == 0) {
        j.refusal.why = "ValueError: this rank does not like it";
    } else if (slow_post && draw(&luck, 400) == 0) {
        hash += 1 + (uint64_t)me;
        prepare(&x, &j, (int64_t)draw(&luck, 1000)); /* another call */
    }
    if (j.refusal.why || hash != hd_mix(op, 7))
        must_fail[at][me] = 1;
    rc = hd_check_mpi(c, &j, hash);
    if (watched) {
        fprintf(stderr, "rank %d: check %llu ended, and the watchdog goes on\n", me, (unsigned long long)op);
        __atomic_add_fetch(&wrong, 1, __ATOMIC_RELAXED);
    }
    if (text)
        snprintf(text, 400, "%s", j.text ? j.text : "");
    if (j.code == HD_ERR_INTERRUPT)
        rc = RAISED;
    else if (rc || j.refusal.why)
        rc = ERROR;
    else
        rc = j.checked.carried ? CARRIED : RESULT;
    if (!is_right(&x, &j)) {
        fprintf(stderr, "rank %d: the data of check %llu is wrong\n", me, (unsigned long long)op);
        __atomic_add_fetch(&wrong, 1, __ATOMIC_RELAXED);
    }
    if (fits(&x, &j) ? rc == RESULT : rc == CARRIED) {
        fprintf(stderr, "rank %d: check %llu has %s\n", me, (unsigned long long)op, rc == RESULT ? "no letter" : "one");
        __atomic_add_fetch(&wrong, 1, __ATOMIC_RELAXED);
    }
    j.in = &j.in1;
    j.out = &j.out1;
    hd_job_clear(&j);
    return rc;
}

static int nodes_of_ranks[MOST];
static hd_stretch stretches[MOST];

static void place_ranks(void)
{
    for (int r = 0; r < ranks; r++) {
        nodes_of_ranks[r] = r / each;
        stretches[r / each].last = r;
        if (r % each == 0)
            stretches[r / each].first = r;
    }
}

static void enter(hd_comm *c)
{
    hd_caucus *k = calloc(1, sizeof *k);
    int rc;
    if (!k || hd_post_open(c, &rc)) {
        fprintf(stderr, "rank %d: no post\n", me);
        exit(2);
    }
    *k = (hd_caucus){.place = me % each, .ranks = each, .speakers = SPEAKERS, .at = halls[me / each]};
    k->nodes = (ranks + each - 1) / each;
    k->node_of = nodes_of_ranks;
    k->stretch = stretches;
    k->room = hd_caucus_room(each);
    if (me / each == (ranks - 1) / each)
        k->ranks = ranks - me / each * each; /* a smaller node */
    c->post->mpi = ALL;
    if (each > 1)
        c->post->caucus = k;
    else
        free(k);
}

static void leave(hd_comm *c)
{
    free(c->post->caucus);
    c->post->caucus = NULL;
    hd_post_close(c, 1);
}

/* Whether this rank finds all that the others have sent it. */
static int is_tidy(hd_comm *c)
{
    for (int i = 0; i < 2000; i++, nap_us(1000)) {
        for (int k = opened; k--;) { /* quotes of a call that it has left */
            MPI_Request q = open_[k];
            int gone;
            MPI_Test(&q, &gone, MPI_STATUS_IGNORE);
        }
        if (hd_post_tidy(c->post))
            return !opened;
    }
    return 0;
}

/* Reads what the others have sent, until nothing is left: notes and lists, and with `ballots` these as well. */
static void read_all(hd_comm *c, int ballots)
{
    static int64_t unread[MOST];
    int64_t left = 1;
    __atomic_store_n(&unread[me], INT64_MAX / MOST, __ATOMIC_RELAXED);
    meet(&between, (uint32_t)ranks);
    for (int i = 0; i < 2000 && left; i++, nap_us(1000)) {
        hd_post_read(c);
        if (ballots)
            hd_post_tidy(c->post);
        __atomic_store_n(&unread[me], c->post->unread + (ballots ? c->post->rounds.unread : 0), __ATOMIC_RELAXED);
        for (int r = left = 0; r < ranks; r++)
            left += __atomic_load_n(&unread[r], __ATOMIC_RELAXED);
    }
    if (left)
        fprintf(stderr, "rank %d: %lld messages are left\n", me, (long long)left);
    __atomic_add_fetch(&wrong, left != 0, __ATOMIC_RELAXED);
    meet(&between, (uint32_t)ranks);
}

/* As if the group were a new one. */
static void renew(hd_comm *c)
{
    read_all(c, 0);
    hd_post_forget(c->post, c->post->now + 1);
    c->post->apart[0] = 0;
    c->post->rounds.went = c->post->rounds.stayed = 0;
}

/* Each rank begins some checks that others never do, and leaves. Then all messages must be found. */
static void go_apart(hd_comm *c)
{
    for (int k = me % 4; k; k--) {
        hd_job j;
        hd_job_init(&j, c, HD_ALL_REDUCE, "a call");
        j.refusal.why = "ValueError: this rank is ahead";
        hd_check_mpi(c, &j, 0);
    }
    hd_post_end(c->post);
    read_all(c, 1);
}

static void *by_chance(void *arg)
{
    static int slots[MOST];
    hd_comm c = {.name = "stress", .check = LEVEL, .size = ranks, .node_slot = slots};
    chance all = chance_of(seed, 100);
    uint64_t op = 0;
    me = c.rank = (int)(intptr_t)arg;
    luck = chance_of(seed, (uint64_t)me);
    enter(&c);
    while (!__atomic_load_n(&over, __ATOMIC_ACQUIRE)) {
        for (int at = 0; at < BETWEEN; at++, op++) {
            const uint64_t ms = draw(&all, 3) ? 10000 : 1 + draw(&all, draw(&all, 4) ? 20 : 200);
            const double patience = 1e-3 * (double)ms;
            __atomic_store_n(&hurried[at], ms < 10000, __ATOMIC_RELAXED);
            if (draw(&luck, 50) == 0) /* much too late, or almost */
                nap_us(draw(&luck, 3) && ms < 1000 ? (long)(1000 * ms + draw(&luck, 2000)) - 1000
                                                   : (long)draw(&luck, 150000));
            outcome[at][me] = (uint8_t)check(&c, op, at, patience, NULL);
        }
        meet(&between, (uint32_t)ranks);
        __atomic_store_n(&released, made, __ATOMIC_RELEASE); /* the same on all */
        if (me == 0) {
            compare();
            __atomic_store_n(&done, done + BETWEEN, __ATOMIC_RELAXED);
            memset(outcome, 0, sizeof outcome);
            memset(must_fail, 0, sizeof must_fail);
            __atomic_store_n(&over, done >= wanted || wrong, __ATOMIC_RELEASE);
        }
        meet(&between, (uint32_t)ranks);
        if (!is_tidy(&c)) {
            fprintf(stderr, "rank %d: ballots are left\n", me);
            __atomic_add_fetch(&wrong, 1, __ATOMIC_RELAXED);
        }
        meet(&between, (uint32_t)ranks);
        if (LEVEL == HD_CHECK_FAST)
            renew(&c);
    }
    go_apart(&c);
    leave(&c);
    return NULL;
}

/* Ends the run if a rank waits for ever. */
static void *watch(void *arg)
{
    uint64_t before = 0;
    (void)arg;
    for (int64_t until = hd_until(STUCK_S); hd_now() < until; nap_us(100000))
        if (__atomic_load_n(&done, __ATOMIC_RELAXED) != before) {
            before = __atomic_load_n(&done, __ATOMIC_RELAXED);
            until = hd_until(STUCK_S);
        }
    printf("%d ranks, %llu checks, and then some rank waits for ever\n", ranks, (unsigned long long)before);
    fflush(stdout);
    _Exit(1);
}

static char texts[MOST][400];
static int code_of[MOST];
static int late, absent;

static void *once(void *arg)
{
    static int slots[MOST];
    hd_comm c = {.name = "stress", .check = LEVEL, .size = ranks, .node_slot = slots};
    me = c.rank = (int)(intptr_t)arg;
    luck = chance_of(1, (uint64_t)me);
    enter(&c);
    if (me == 1 && late)
        nap_us(9000000);
    if (me != 1 || !absent)
        code_of[me] = check(&c, 0, 0, 10, texts[me]);
    return NULL;
}

static void run(void *(*rank_main)(void *))
{
    static pthread_t all[MOST], watching;
    pthread_attr_t attr;
    pthread_attr_init(&attr);
    pthread_attr_setstacksize(&attr, 2 << 20);
    for (int i = 0; i < ranks; i++)
        if (pthread_create(&all[i], &attr, rank_main, (void *)(intptr_t)i)) {
            perror("pthread_create");
            exit(2);
        }
    pthread_create(&watching, &attr, watch, NULL);
    for (int i = 0; i < ranks; i++)
        pthread_join(all[i], NULL);
}

/* Every rank must name rank 1, and no other. */
static int count(void)
{
    run(once);
    report(ranks);
    for (int i = 0; i < ranks; i++) {
        const int right = absent ? strstr(texts[i], "no word from rank 1.") || strstr(texts[i], "rank 1 has not") ||
                                       strstr(texts[i], "gave up")
                                 : code_of[i] == CARRIED;
        if (!(i == 1 && absent) && !right && wrong++ < 3)
            printf("\nrank %d: %s\n", i, texts[i]);
    }
    printf("; %llu wrong%s%.150s\n", (unsigned long long)wrong, absent ? "; rank 0: " : "", texts[0]);
    return wrong ? 1 : 0;
}

int main(int argc, char **argv)
{
    size_t hall;
    if (argc < 3 || (ranks = atoi(argv[2])) < 2 || ranks > MOST) {
        fprintf(stderr, "usage: post SEED RANKS CHECKS [EACH] | post late RANKS | post absent RANKS\n");
        return 2;
    }
    open_boxes(ranks);
    if (argc > 4)
        each = atoi(argv[4]);
    place_ranks();
    hall = hd_caucus_bytes(each, hd_caucus_room(each));
    mail_to = world_rank;
    for (int i = 0; i < ROUNDS; i++)
        pthread_mutex_init(&quoted[i].mu, NULL);
    for (int i = 0; i * each < ranks; i++)
        halls[i] = aligned_alloc(HD_LINE, (hall + HD_LINE - 1) / HD_LINE * HD_LINE);
    for (int i = 0; i * each < ranks; i++)
        memset(halls[i], 0, hall);
    hd_py.slow = raises;
    if (argc == 3) {
        slow_post = 0;
        late = strcmp(argv[1], "late") == 0;
        absent = !late;
        return count();
    }
    seed = strtoull(argv[1], NULL, 10);
    wanted = strtoull(argv[3], NULL, 10);
    run(by_chance);
    printf("%d ranks, %llu checks, %llu failed, %llu of them on some ranks, %llu exceptions, %llu wrong\n", ranks,
           (unsigned long long)done, (unsigned long long)failed, (unsigned long long)parted, (unsigned long long)raised,
           (unsigned long long)wrong);
    return wrong ? 1 : 0;
}
