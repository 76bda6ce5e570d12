/* The roll call (hd_roll.c): members that are late, stopped, interrupted, out of time or of another opinion.
 *
 *   roll SEED MEMBERS MS         by chance, for so many milliseconds
 *   roll SEED late MEMBERS       the last one disagrees, and some come later: all hear at once
 *   roll count MEMBERS           one call, all present: the messages of one member
 *   roll absent MEMBERS          one call without member 1: whom do the others name, at what cost
 *
 * A member that is told to go on waits for all others, as it would in MPI_Comm_create_group: if one of them does not
 * come, or agreed on something else, that is the mistake looked for. */
#include <pthread.h>
#include <string.h>

#include "harness.h"
#include "hd_base.h"
#include "hd_job.h"
#include "hd_roll.h"
#include "mail.h"

enum { PATIENCE_S = 10, ROUNDS = 8 };
#define AT_ONCE 10000000000LL /* ns */

struct stub_request {
    int dummy;
};

static int members, in_order[MOST];
static uint64_t seed, length_ms, wrong, went, failed;
static uint64_t agreed_on[MOST]; /* the list that a member went on with */
static uint32_t came, rounds, ending;
static int over;
static int64_t unread;
static __thread int may_interrupt;

/* ---- members ---- */

int MPI_Testall(int n, MPI_Request *req, int *flag, MPI_Status *st)
{
    return (void)n, (void)req, (void)st, *flag = 1, MPI_SUCCESS;
}

int MPI_Test(MPI_Request *req, int *done, MPI_Status *st)
{
    return (void)req, (void)st, *done = 1, MPI_SUCCESS;
}

static int raises(hd_job *j) { return (void)j, may_interrupt && !draw(&luck, 4); }

/* All others go on as well, soon. */
static void expect_all(uint64_t list)
{
    const int64_t until = hd_until(PATIENCE_S);
    const uint32_t round = __atomic_load_n(&rounds, __ATOMIC_ACQUIRE);
    __atomic_store_n(&agreed_on[me], list, __ATOMIC_RELEASE);
    if ((int)__atomic_add_fetch(&came, 1, __ATOMIC_ACQ_REL) == members) {
        for (int r = 0; r < members; r++)
            if (__atomic_load_n(&agreed_on[r], __ATOMIC_ACQUIRE) != list)
                __atomic_add_fetch(&wrong, 1, __ATOMIC_RELAXED);
        __atomic_store_n(&came, 0, __ATOMIC_RELEASE);
        __atomic_store_n(&over, (int)__atomic_load_n(&ending, __ATOMIC_ACQUIRE) == members, __ATOMIC_RELEASE);
        __atomic_add_fetch(&went, 1, __ATOMIC_RELAXED);
        __atomic_add_fetch(&rounds, 1, __ATOMIC_ACQ_REL);
    }
    while (__atomic_load_n(&rounds, __ATOMIC_ACQUIRE) == round) {
        nap_us(50);
        if (hd_now() > until) {
            printf("member %d went on alone: %u of %d came\n", me, __atomic_load_n(&came, __ATOMIC_ACQUIRE), members);
            fflush(stdout);
            _Exit(1);
        }
    }
}

static int one_call(double patience, uint64_t list, int level, char *text)
{
    hd_roll r = {.mpi = 1, .unread = &unread, .ranks = in_order, .n = members, .rank = me, .tag = 31, .list = list,
                 .level = level};
    int code;
    r.until = hd_until(patience);
    code = hd_roll_call(&r);
    if (text)
        memcpy(text, r.text, sizeof r.text);
    if (!code) {
        expect_all(hd_mix(hd_mix(list, (uint64_t)level), r.uid));
        return code;
    }
    __atomic_add_fetch(&failed, 1, __ATOMIC_RELAXED);
    if (!r.text[0] || (code != HD_ERR_TIMEOUT && code != HD_ERR_MISMATCH && code != HD_ERR_INTERRUPT)) {
        printf("member %d: code %d, '%s'\n", me, code, r.text);
        __atomic_add_fetch(&wrong, 1, __ATOMIC_RELAXED);
    }
    return code;
}

static void *by_chance(void *arg)
{
    const int64_t until = hd_until((double)length_ms * 1e-3);
    me = (int)(intptr_t)arg;
    luck = chance_of(seed, (uint64_t)me);
    /* A mixed lot, as long as the others are still at it; in the end all call until all go on once more. */
    while (hd_now() < until) {
        const double patience = draw(&luck, 2) ? 1e-3 * (double)(1 + draw(&luck, 30)) : 1e-3 * (double)draw(&luck, 600);
        may_interrupt = !draw(&luck, 6);
        one_call(patience, draw(&luck, 2000) ? 7 : 8, draw(&luck, 2000) ? 1 : 2, NULL);
        if (!draw(&luck, 20))
            nap_us((long)draw(&luck, draw(&luck, 8) ? 3000 : 60000));
    }
    may_interrupt = 0;
    __atomic_add_fetch(&ending, 1, __ATOMIC_ACQ_REL);
    while (!__atomic_load_n(&over, __ATOMIC_ACQUIRE))
        one_call(3, 7, 1, NULL);
    return NULL;
}

static pthread_barrier_t together;

static void *late(void *arg)
{
    me = (int)(intptr_t)arg;
    luck = chance_of(seed, (uint64_t)me);
    for (int round = 0; round < ROUNDS; round++) {
        int64_t begun;
        pthread_barrier_wait(&together);
        if (me && me < members - 1 && draw(&luck, 2))
            nap_us((long)draw(&luck, 2) * 300000 + (long)draw(&luck, 50000));
        begun = hd_now();
        if (one_call(20, 7, me == members - 1 ? 2 : 1, NULL) != HD_ERR_MISMATCH || hd_now() - begun > AT_ONCE) {
            printf("round %d: member %d heard nothing for %.1f s\n", round, me, (double)(hd_now() - begun) * 1e-9);
            fflush(stdout);
            _Exit(1);
        }
    }
    return NULL;
}

static char texts[MOST][320];
static int absent = -1;

static void *once(void *arg)
{
    me = (int)(intptr_t)arg;
    luck = chance_of(1, (uint64_t)me);
    if (me != absent)
        one_call(absent < 0 ? 60 : 1.5, 7, 1, texts[me]);
    return NULL;
}

static void run(void *(*member)(void *))
{
    static pthread_t all[MOST];
    pthread_attr_t attr;
    pthread_attr_init(&attr);
    pthread_attr_setstacksize(&attr, 1 << 18);
    for (int i = 0; i < members; i++)
        if (pthread_create(&all[i], &attr, member, (void *)(intptr_t)i)) {
            perror("pthread_create");
            exit(2);
        }
    for (int i = 0; i < members; i++)
        pthread_join(all[i], NULL);
}

int main(int argc, char **argv)
{
    const int in = argc == 4 && !strcmp(argv[2], "late") ? 3 : 2; /* the argument with the members */
    if (argc < 3 || (members = atoi(argv[in])) < 2 || members > MOST) {
        fprintf(stderr, "usage: roll SEED MEMBERS MS | roll SEED late MEMBERS | roll count MEMBERS | roll absent MEMBERS\n");
        return 2;
    }
    seed = strtoull(argv[1], NULL, 10);
    open_boxes(members);
    hd_py.slow = raises;
    for (int i = 0; i < members; i++)
        in_order[i] = i;
    if (argc == 3) {
        slow_post = 0;
        absent = strcmp(argv[1], "absent") ? -1 : 1;
        run(once);
        report(members);
        if (absent >= 0)
            for (int i = 0; i < members; i++)
                if (i != absent && strcmp(texts[i], texts[0]) && wrong++ < 3)
                    printf("\nmember %d: %s", i, texts[i]);
        printf("%s%s, %llu wrong\n", absent >= 0 ? "; member 0: " : "", texts[0], (unsigned long long)wrong);
        return wrong ? 1 : 0;
    }
    if (in == 3) {
        pthread_barrier_init(&together, NULL, (unsigned)members);
        run(late);
        printf("%d members, %llu times a member failed, %llu wrong\n", members, (unsigned long long)failed,
               (unsigned long long)wrong);
        return wrong ? 1 : 0;
    }
    length_ms = strtoull(argv[3], NULL, 10);
    run(by_chance);
    printf("%d members, %llu times all went on, %llu times a member failed, %llu wrong\n", members,
           (unsigned long long)went, (unsigned long long)failed, (unsigned long long)wrong);
    return wrong ? 1 : 0;
}
