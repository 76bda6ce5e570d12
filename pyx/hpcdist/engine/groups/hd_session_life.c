/* A session: one job's ranks, as one init_process_group sees them. It contains the control
 * communicator, the node's status page (hd_status.c) and the watchdog (hd_watchdog.c), and counts
 * its communicators. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "hd_base.h"
#include "hd_cma.h"
#include "hd_comm.h"
#include "hd_cpus.h"
#include "hd_exit_page.h"
#include "hd_ft.h"
#include "hd_hydra.h"
#include "hd_meet.h"
#include "hd_places.h"
#include "hd_prte.h"
#include "hd_recorder_file.h"
#include "hd_session.h"
#include "hd_session_life.h"
#include "hd_shared.h"
#include "hd_status.h"
#include "hd_watchdog.h"

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

/* ---- queries ---- */

int hd_session_rank(const hd_session *s) { return s->rank; }
int hd_session_size(const hd_session *s) { return s->size; }
uint64_t hd_session_node(const hd_session *s, int *slot)
{
    *slot = s->page ? s->slot : -1;
    return s->node;
}
int hd_session_active(const hd_session *s) { return s->active; }
int hd_session_machine(const hd_session *s) { return s->machine_n; }
void hd_session_cpus(const hd_session *s, int *own, int *node)
{
    *own = s->own_cpus;
    *node = s->node_cpus;
}

/* ---- open and close ---- */

/* Of all ranks of the machine, also where HPCDIST_NODES divides it: they share its cores. */
static void count_cpus(hd_session *s, MPI_Comm machine, hd_quota quota)
{
    hd_cpus_count(machine, quota, &s->own_cpus, &s->node_cpus);
    s->spin = s->node_cpus >= s->machine_n;
    s->lane_spin = s->own_cpus >= 2 && s->node_cpus >= 2 * s->machine_n;
}

/* Returns whether the node's ranks can see each other's processes. */
static int fill_page(hd_session *s, MPI_Comm node)
{
    void *at = NULL;
    struct stat st;
    uint64_t ns[2] = {0, 0};
    s->page_bytes = sizeof(entry) * (size_t)s->node_n;
    hd_share(node, s->page_bytes, &at);
    s->page = at;
    s->pidfd = malloc((size_t)s->node_n * sizeof *s->pidfd);
    s->dead = calloc((size_t)s->node_n, sizeof *s->dead);
    s->stopped = s->page ? calloc((size_t)s->node_n, sizeof *s->stopped) : NULL;
    if (s->page) {
        entry *e = &s->page[s->slot];
        e->pid = (uint32_t)getpid();
        e->world_rank = (uint32_t)s->rank;
        e->beat = e->since = hd_uptime();
        snprintf(e->record, sizeof e->record, "%s", hd_rec_path());
        __atomic_store_n(&e->state, RUNNING, __ATOMIC_RELEASE);
    }
    if (stat("/proc/self/ns/pid", &st) == 0)
        ns[0] = (uint64_t)st.st_ino, ns[1] = ~ns[0];
    /* Also a barrier: the pids are filled in. */
    MPI_Allreduce(MPI_IN_PLACE, ns, 2, MPI_UINT64_T, MPI_MAX, node);
    for (int i = 0; i < s->node_n; i++) {
        s->pidfd[i] = ns[0] == ~ns[1] ? NO_PIDFD : UNSEEN;
        if (s->page && i != s->slot && s->pidfd[i] != UNSEEN) {
            int fd = (int)syscall(SYS_pidfd_open, s->page[i].pid, 0);
            s->pidfd[i] = fd >= 0 ? fd : NO_PIDFD;
        }
    }
    hd_exit_follow(s);
    return ns[0] == ~ns[1];
}

static hd_session *new_session(hd_text *t)
{
    hd_session *s = calloc(1, sizeof *s);
    int level = MPI_THREAD_SINGLE;
    if (!s) {
        hd_say(t, "no memory for a session");
        return NULL;
    }
    s->refs = 1;
    s->ctl = MPI_COMM_NULL;
    s->wake[0] = s->wake[1] = -1;
    for (int i = 0; i < HD_HELD; i++)
        s->held[i] = -1;
    pthread_mutex_init(&s->mu, NULL);
    pthread_mutex_init(&s->mpi_mu, NULL);
    MPI_Query_thread(&level);
    s->serialized = level < MPI_THREAD_MULTIPLE;
    return s;
}

/* Agreed on where the ranks make their session again: another one may die meanwhile. */
static int made(const hd_session *s, int error)
{
    return s->remade ? hd_ft_made(s->ctl, error) : error;
}

/* Starts the watchdog. Nothing would end a call for a rank without one, nor show that it lives: so
 * all fail if one rank cannot start it. Collective. */
static int watch(hd_session *s, hd_text *t)
{
    int without = hd_watchdog_start(s) ? s->size : s->rank;
    const int rc = made(s, MPI_Allreduce(MPI_IN_PLACE, &without, 1, MPI_INT, MPI_MIN, s->ctl));
    if (rc == MPI_SUCCESS && without == s->size)
        return HD_OK;
    if (rc)
        hd_say(t, "MPI_Allreduce failed (error %d)", rc);
    else
        hd_say(t,
               "rank %d cannot start its watchdog: it may have no more threads, or no more open "
               "files. See ulimit -u and ulimit -n there, and its container's limit of processes",
               without);
    return HD_ERR_BACKEND;
}

/* The ranks of this machine, and those of them that share a node. */
static int divide(hd_session *s, MPI_Comm *machine, MPI_Comm *node, hd_text *t)
{
    int place, rc = MPI_ERR_OTHER;
    const int code = hd_place(s->ctl, &place, t);
    if (!code)
        rc = MPI_Comm_split_type(s->ctl, MPI_COMM_TYPE_SHARED, s->rank, MPI_INFO_NULL, machine);
    rc = made(s, rc);
    if (code)
        return code;
    if (rc) {
        hd_say(t, "MPI_Comm_split_type failed (error %d)", rc);
        return HD_ERR_BACKEND;
    }
    if (s->ft)
        hd_ft_guard(*machine);
    *node = *machine;
    if (place < 0)
        return HD_OK;
    if ((rc = made(s, MPI_Comm_split(*machine, place, s->rank, node)))) {
        hd_say(t, "MPI_Comm_split failed (error %d)", rc);
        return HD_ERR_BACKEND;
    }
    if (s->ft)
        hd_ft_guard(*node);
    return HD_OK;
}

static void free_guarded(const hd_session *s, MPI_Comm *made)
{
    if (s->ft)
        hd_ft_unguard(*made);
    MPI_Comm_free(made);
}

/* Collective over its control communicator, whose ranks are all here. After an error the caller
 * gives the session back. */
static int furnish(hd_session *s, hd_quota quota, hd_text *t)
{
    MPI_Comm machine = MPI_COMM_NULL, node = MPI_COMM_NULL;
    uint64_t job;
    int rc;

    MPI_Comm_rank(s->ctl, &s->rank);
    MPI_Comm_size(s->ctl, &s->size);
    s->active = s->size;
    hd_ft_begin(s);
    if ((rc = divide(s, &machine, &node, t))) {
        if (machine != MPI_COMM_NULL)
            free_guarded(s, &machine);
        return rc;
    }
    MPI_Comm_size(machine, &s->machine_n);
    MPI_Comm_size(node, &s->node_n);
    MPI_Comm_rank(node, &s->slot);
    hd_cma_try(machine);
    s->node = hd_random64();
    MPI_Bcast(&s->node, 1, MPI_UINT64_T, 0, node);
    job = s->node; /* rank 0's */
    MPI_Bcast(&job, 1, MPI_UINT64_T, 0, s->ctl);
    hd_rec_open(s->rank, s->size, job, s->slot == 0);
    count_cpus(s, machine, quota); /* also a barrier */
    if (s->slot == 0)
        hd_unlink_mpich_segment();
    hd_prte_find();
    /* Where no rank would see a death, hydra must. */
    hd_hydra_copy(node, s->node, s->slot, fill_page(s, node) ? s->node_n : 1, s->held);
    if (node != machine)
        free_guarded(s, &node);
    free_guarded(s, &machine);
    return watch(s, t);
}

static int opening;
int hd_session_opening(void) { return __atomic_load_n(&opening, __ATOMIC_ACQUIRE); }
void hd_session_opened(void) { __atomic_store_n(&opening, 0, __ATOMIC_RELEASE); }

int hd_session_open(MPI_Comm from, double timeout, hd_quota quota, hd_session **out, char *text,
                    size_t room)
{
    hd_session *s;
    char why[256];
    hd_text t;
    int rc;

    *out = NULL;
    hd_text_init(&t, text, room);
    if (!(s = new_session(&t)))
        return HD_ERR_MEMORY;
    if ((rc = hd_meet(from, hd_until(timeout), &s->ctl, why, sizeof why))) {
        if (rc == HD_ERR_TIMEOUT)
            hd_say(&t, "timeout after %.3g s in init_process_group: ", timeout);
        else
            hd_say(&t, "init_process_group: ");
        hd_say(&t, "%s. All ranks must call it; it may be called again.", why);
    } else {
        __atomic_store_n(&opening, 1, __ATOMIC_RELEASE);
        rc = furnish(s, quota, &t);
    }
    if (rc)
        hd_session_unref(s);
    else
        *out = s;
    return rc;
}

int hd_session_reopen(MPI_Comm ctl, hd_quota quota, hd_session **out, char *text, size_t room)
{
    hd_session *s;
    hd_text t;
    int rc;

    *out = NULL;
    hd_text_init(&t, text, room);
    if (!(s = new_session(&t)))
        return HD_ERR_MEMORY;
    s->ctl = ctl;
    s->remade = 1;
    if ((rc = furnish(s, quota, &t))) {
        s->ctl = MPI_COMM_NULL; /* the caller keeps it: the ranks have to agree over it */
        hd_session_unref(s);
    } else {
        *out = s;
    }
    return rc;
}

void hd_session_ref(hd_session *s) { __atomic_fetch_add(&s->refs, 1, __ATOMIC_ACQ_REL); }

int hd_session_is_last(const hd_session *s)
{
    return __atomic_load_n(&s->refs, __ATOMIC_ACQUIRE) == 1;
}

void hd_session_unref(hd_session *s)
{
    int down = 0;
    if (__atomic_sub_fetch(&s->refs, 1, __ATOMIC_ACQ_REL))
        return;
    hd_session_set_leaving(s);
    hd_watchdog_stop(s);
    for (int i = 0; i < s->node_n; i++)
        if (s->pidfd && s->pidfd[i] >= 0)
            close(s->pidfd[i]);
    for (int i = 0; i < HD_HELD; i++)
        if (s->held[i] >= 0)
            close(s->held[i]);
    MPI_Finalized(&down);
    if (!down && s->ctl != MPI_COMM_NULL && !s->met.going)
        MPI_Comm_free(&s->ctl);
    hd_exit_unfollow(s);
    free(s->pidfd);
    free(s->dead);
    free(s->stopped);
    free(s->lost);
    pthread_mutex_destroy(&s->mu);
    pthread_mutex_destroy(&s->mpi_mu);
    if (!s->met.going) /* else MPI still writes the word of an agreement that gave up */
        free(s);
}

void hd_session_adopt(hd_session *s, hd_comm *c)
{
    pthread_mutex_lock(&s->mu);
    c->next = s->comms;
    s->comms = c;
    pthread_mutex_unlock(&s->mu);
}

void hd_session_forget(hd_session *s, hd_comm *c)
{
    pthread_mutex_lock(&s->mu);
    for (hd_comm **p = &s->comms; *p; p = &(*p)->next)
        if (*p == c) {
            *p = c->next;
            break;
        }
    pthread_mutex_unlock(&s->mu);
}
