/* Fault tolerance of MPI: see hd_ft.h. */
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "hd_accord.h"
#include "hd_base.h"
#include "hd_ft.h"
#include "hd_session.h"
#include "hd_ulfm.h"

#define EXPLAIN_S 0.5 /* seconds for the watchdog to see which rank died, after MPI has */
#define NAMED 16      /* ranks that an error lists */

static int wanted;

void hd_ft_want(int yes) { wanted = yes; }

int hd_ft_on(const hd_session *s) { return s->ft; }

int hd_ft_lost(const hd_session *s, int *ranks, int room)
{
    int n = 0;
    for (int r = 0; s->lost && r < s->size; r++)
        if (__atomic_load_n(&s->lost[r], __ATOMIC_ACQUIRE) && n++ < room)
            ranks[n - 1] = r;
    return n;
}

/* Whether one of the lost ranks breaks the session. */
static int lost_one(const hd_session *s)
{
    const int n = __atomic_load_n(&s->uncommitted, __ATOMIC_SEQ_CST) ? s->active : s->size;
    int found = 0;
    for (int r = 0; s->lost && r < n; r++)
        found |= __atomic_load_n(&s->lost[r], __ATOMIC_SEQ_CST);
    return found;
}

void hd_ft_committed(hd_session *s)
{
    __atomic_store_n(&s->uncommitted, 0, __ATOMIC_SEQ_CST);
    if (lost_one(s))
        hd_ft_break(s);
}

int hd_ft_told(const hd_session *s)
{
    for (int i = 0; s->page && i < s->node_n; i++) {
        const uint32_t how = __atomic_load_n(&s->page[i].recovers, __ATOMIC_ACQUIRE);
        if (how == HD_DEATH || how == HD_BROKE)
            return 1;
    }
    return 0;
}

/* Some rank has called reconfigure, and knows of no death. */
static int for_no_death(const hd_session *s)
{
    if (__atomic_load_n(&s->settled, __ATOMIC_ACQUIRE))
        return 1;
    for (int i = 0; s->page && i < s->node_n; i++)
        if (__atomic_load_n(&s->page[i].recovers, __ATOMIC_ACQUIRE) >= HD_NO_DEATH)
            return 1;
    return 0;
}

/* The first of n ranks. */
static void say_ranks(hd_text *t, const int *ranks, int n)
{
    hd_say(t, n > 1 ? "ranks " : n ? "rank " : "a rank");
    for (int i = 0; i < n && i < NAMED; i++)
        hd_say(t, "%s%d", i ? ", " : "", ranks[i]);
    if (n > NAMED)
        hd_say(t, " and %d more", n - NAMED);
}

void hd_ft_say_why(const hd_session *s, hd_text *t)
{
    int ranks[NAMED];
    const int n = hd_ft_lost(s, ranks, NAMED);
    if (!n && for_no_death(s)) {
        hd_say(t, "the default group is being reconfigured");
        return;
    }
    say_ranks(t, ranks, n);
    hd_say(t, " of the job died");
}

void hd_ft_why(const hd_session *s, char *text, size_t room)
{
    hd_text t;
    hd_text_init(&t, text, room);
    hd_ft_say_why(s, &t);
}

void hd_ft_settle(hd_session *s, const int *left, int n)
{
    for (int r = 0; r < s->size; r++) {
        int lives = 0;
        for (int i = 0; i < n && !lives; i++)
            lives = left[i] == r;
        if (!lives)
            __atomic_store_n(&s->lost[r], 1, __ATOMIC_RELEASE);
    }
    __atomic_store_n(&s->settled, 1, __ATOMIC_RELEASE);
}

/* A revocation, too, tells of a death: one that another rank saw first. */
static int tells_of_death(int error)
{
#ifdef HD_HAS_ULFM
    int class = error;
    if (error)
        MPI_Error_class(error, &class);
    return class == MPIX_ERR_REVOKED || class == MPIX_ERR_PROC_FAILED;
#else
    (void)error;
    return 0;
#endif
}

int hd_ft_say_failed(const hd_comm *c, int error, hd_text *t)
{
#ifdef HD_HAS_ULFM
    MPI_Group failed = MPI_GROUP_EMPTY, all;
    int from[NAMED], to[NAMED], n = 0;
    if (!tells_of_death(error) && !hd_ft_pending(error))
        return 0;
    if (!MPIX_Comm_get_failed(c->mpi, &failed))
        MPI_Group_size(failed, &n);
    for (int i = 0; i < NAMED; i++)
        from[i] = i;
    MPI_Comm_group(c->mpi, &all);
    MPI_Group_translate_ranks(failed, n < NAMED ? n : NAMED, from, all, to);
    MPI_Group_free(&all);
    if (failed != MPI_GROUP_EMPTY)
        MPI_Group_free(&failed);
    say_ranks(t, to, n);
    return 1;
#else
    (void)c, (void)error, (void)t;
    return 0;
#endif
}

int hd_ft_explains(hd_session *s, int error)
{
    const int64_t until = hd_until(EXPLAIN_S);
    const struct timespec nap = {0, 1000000};
    if (!s->ft)
        return 0;
    if (tells_of_death(error))
        hd_ft_break(s);
    while (!lost_one(s) && !for_no_death(s) && hd_now() < until) {
        int there; /* Open MPI takes up a death in calls that wait, or find nothing */
        MPI_Iprobe(MPI_ANY_SOURCE, 0, MPI_COMM_SELF, &there, MPI_STATUS_IGNORE);
        nanosleep(&nap, NULL);
    }
    if (lost_one(s))
        hd_ft_break(s); /* the watchdog is about to do so */
    return __atomic_load_n(&s->broken, __ATOMIC_ACQUIRE);
}

void hd_ft_hear(hd_session *s)
{
    hd_ft_break(s);
    hd_ft_explains(s, MPI_SUCCESS);
}

/* ---- groups of some ranks ----
 *
 * Open MPI 5.0.11 waits for ever in MPI_Comm_create_group if a member dies there, also after a
 * revocation, which ends MPI_Comm_dup and MPI_Comm_split. So another thread makes the call, and is
 * left behind in that case. */

typedef struct creation {
    MPI_Comm from, made;
    MPI_Group group;
    int tag, rc;
    int done; /* atomic: 1 the call has returned, 2 its caller has given up; the second one frees */
} creation;

static void *create(void *arg)
{
    creation *k = arg;
    int running = 0;
    k->rc = MPI_Comm_create_group(k->from, k->group, k->tag, &k->made);
    if (!__atomic_compare_exchange_n(&k->done, &running, 1, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        free(k);
    return NULL;
}

int hd_ft_create_group(const hd_session *s, MPI_Comm from, MPI_Group group, int tag, MPI_Comm *made)
{
    creation *k = calloc(1, sizeof *k);
    int running = 0, rc, begun;
    int64_t until = 0;
    pthread_t thread;
    hd_waiter w;

    if (!k)
        return MPI_ERR_OTHER;
    *k = (creation){.from = from, .group = group, .tag = tag, .made = MPI_COMM_NULL};
    begun = pthread_create(&thread, NULL, create, k) == 0;
    if (!begun) {
        free(k);
        return MPI_ERR_OTHER;
    }
    pthread_detach(thread);
    hd_waiter_init(&w, 0, -1);
    while (!__atomic_load_n(&k->done, __ATOMIC_ACQUIRE)) {
        if (!(hd_waiter_step(&w) & HD_WAIT_CLOCK) || !__atomic_load_n(&s->broken, __ATOMIC_ACQUIRE))
            continue;
        until = until ? until : hd_until(EXPLAIN_S);
        if (hd_now() > until && __atomic_compare_exchange_n(&k->done, &running, 2, 0,
                                                            __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
            return MPI_ERR_OTHER; /* the group stays allocated, too: the thread may read it */
        running = 0;
    }
    rc = k->rc;
    *made = k->made;
    free(k);
    return rc;
}

#ifdef HD_HAS_ULFM

/* With `mu` held. */
#define GUARDED 6
static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
static MPI_Comm guarded[GUARDED];
static int guards;
static unsigned deaths, deaths_shrunk; /* seen so far; when the last shrink began */

const char *hd_ft_missing(void)
{
    int found = 0, level = MPI_THREAD_SINGLE;
    int *enabled = NULL;
    MPI_Comm_get_attr(MPI_COMM_WORLD, MPIX_FT, &enabled, &found);
    if (!found || !enabled || !*enabled)
        return "this Open MPI job was started without it: start it with 'mpirun --with-ft ulfm'";
    MPI_Query_thread(&level);
    if (level < MPI_THREAD_MULTIPLE)
        return "MPI was started below MPI_THREAD_MULTIPLE";
    return NULL;
}

void hd_ft_begin(hd_session *s)
{
    s->ft = wanted && !hd_ft_missing();
    if (!s->ft)
        return;
    s->lost = calloc((size_t)s->size, sizeof *s->lost);
    s->ft = s->lost != NULL;
    /* Else a request without a communicator would end the process. */
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN);
    MPI_Comm_set_errhandler(s->ctl, MPI_ERRORS_RETURN);
}

static void revoke(MPI_Comm comm)
{
    int gone = 1;
    if (!MPIX_Comm_is_revoked(comm, &gone) && !gone)
        MPIX_Comm_revoke(comm);
}

void hd_ft_break(hd_session *s)
{
    int down = 0;
    MPI_Finalized(&down); /* the watchdog of a session that is kept goes on */
    if (!s->ft || down)
        return;
    __atomic_store_n(&s->broken, 1, __ATOMIC_RELEASE);
    pthread_mutex_lock(&s->mu);
    for (hd_comm *c = s->comms; c; c = c->next) {
        if (c->freed)
            continue;
        revoke(c->mpi);
        for (int i = 0; i < HD_PARTS; i++)
            if (c->parts[i] != MPI_COMM_NULL)
                revoke(c->parts[i]);
    }
    pthread_mutex_unlock(&s->mu);
}

void hd_ft_revoke_with(hd_comm *c, enum hd_part which, MPI_Comm part)
{
    hd_session *s = c->session;
    if (!s->ft)
        return;
    pthread_mutex_lock(&s->mu);
    c->parts[which] = part;
    pthread_mutex_unlock(&s->mu);
    if (__atomic_load_n(&s->broken, __ATOMIC_ACQUIRE)) /* by one who may not have seen the part */
        hd_ft_break(s);
}

void hd_ft_lose(hd_session *s, int rank)
{
    if (!s->lost || rank < 0 || rank >= s->size)
        return;
    __atomic_store_n(&s->lost[rank], 1, __ATOMIC_SEQ_CST);
    pthread_mutex_lock(&mu);
    deaths++;
    for (int i = 0; i < guards; i++)
        revoke(guarded[i]);
    pthread_mutex_unlock(&mu);
    if (lost_one(s))
        hd_ft_break(s);
}

/* Another rank has broken the session. */
static int revoked(hd_session *s)
{
    int gone = 0;
    pthread_mutex_lock(&s->mu);
    for (hd_comm *c = s->comms; c && !gone; c = c->next)
        if (!c->freed && MPIX_Comm_is_revoked(c->mpi, &gone))
            gone = 0;
    pthread_mutex_unlock(&s->mu);
    return gone;
}

void hd_ft_look(hd_session *s)
{
    MPI_Group failed = MPI_GROUP_NULL, all = MPI_GROUP_NULL;
    int n = 0, *from, *to, fresh = 0, down = 0;
    MPI_Finalized(&down);
    if (!s->ft || down || MPIX_Comm_get_failed(s->ctl, &failed))
        return;
    fresh = revoked(s);
    MPI_Group_size(failed, &n);
    from = calloc(2 * (size_t)n + 1, sizeof *from);
    if (n && from && !MPI_Comm_group(s->ctl, &all)) {
        to = from + n;
        for (int i = 0; i < n; i++)
            from[i] = i;
        MPI_Group_translate_ranks(failed, n, from, all, to);
        for (int i = 0; i < n; i++)
            if (to[i] >= 0 && to[i] < s->size && !s->lost[to[i]])
                hd_ft_lose(s, to[i]);
        MPI_Group_free(&all);
    }
    free(from);
    if (failed != MPI_GROUP_EMPTY)
        MPI_Group_free(&failed);
    if (fresh)
        hd_ft_break(s);
}

int hd_ft_pending(int error)
{
    int class = error;
    if (!error)
        return 0;
    MPI_Error_class(error, &class);
    return class == MPIX_ERR_PROC_FAILED_PENDING;
}

int hd_ft_made(MPI_Comm from, int error)
{
    int all = error == MPI_SUCCESS;
    if (hd_accord_reach(from, &all))
        all = 0;
    return all ? MPI_SUCCESS : error ? error : MPI_ERR_OTHER;
}

int hd_ft_shrink(MPI_Comm comm, MPI_Comm *left)
{
    int rc;
    pthread_mutex_lock(&mu);
    deaths_shrunk = deaths;
    pthread_mutex_unlock(&mu);
    rc = MPIX_Comm_shrink(comm, left);
    return hd_ft_made_all(comm, rc, left) ? HD_ERR_BACKEND : HD_OK;
}

void hd_ft_guard(MPI_Comm comm)
{
    pthread_mutex_lock(&mu);
    if (guards < GUARDED)
        guarded[guards++] = comm;
    if (deaths != deaths_shrunk) /* it may be among its ranks */
        revoke(comm);
    pthread_mutex_unlock(&mu);
}

void hd_ft_unguard(MPI_Comm comm)
{
    pthread_mutex_lock(&mu);
    for (int i = 0; i < guards; i++)
        if (guarded[i] == comm) {
            guarded[i] = guarded[--guards];
            break;
        }
    pthread_mutex_unlock(&mu);
}

#else

const char *hd_ft_missing(void)
{
    return "this MPI has no fault tolerance: a rank that dies ends the job (Open MPI 5 under "
           "'mpirun --with-ft ulfm' has it)";
}
void hd_ft_begin(hd_session *s) { s->ft = 0; }
void hd_ft_break(hd_session *s) { (void)s; }
void hd_ft_revoke_with(hd_comm *c, enum hd_part which, MPI_Comm part)
{
    (void)c, (void)which, (void)part;
}
void hd_ft_lose(hd_session *s, int rank) { (void)s, (void)rank; }
void hd_ft_look(hd_session *s) { (void)s; }
int hd_ft_pending(int error)
{
    (void)error;
    return 0;
}
int hd_ft_shrink(MPI_Comm comm, MPI_Comm *left)
{
    (void)comm, (void)left;
    return HD_ERR_BACKEND;
}
int hd_ft_made(MPI_Comm from, int error)
{
    (void)from;
    return error;
}
void hd_ft_guard(MPI_Comm comm) { (void)comm; }
void hd_ft_unguard(MPI_Comm comm) { (void)comm; }

#endif

int hd_ft_made_all(MPI_Comm from, int error, MPI_Comm *made)
{
    const int rc = hd_ft_made(from, error);
    if (rc && !error && *made != MPI_COMM_NULL)
        MPI_Comm_free(made);
    return rc;
}
