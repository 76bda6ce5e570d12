/* One rank of a simulated job: the engine's own files, one call of them, and what it cost.
 *
 *   ranks agree            the entry check between nodes, all in time
 *   ranks late             the same, rank 1 late by three quarters of the others' patience
 *   ranks absent           the same, rank 1 does not come, and all others give up
 *   ranks group            the roll call of a new group
 *   ranks start            the meeting of all ranks when the process group is made
 *   ranks group-spread, start-spread, agree-spread: the ranks arrive evenly over two seconds
 *
 * Each rank prints one line: its rank, sent, received, bytes sent, seconds, code, text. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "hd_ballot.h"
#include "hd_base.h"
#include "hd_caucus_life.h"
#include "hd_check_mpi.h"
#include "hd_comm.h"
#include "hd_data.h"
#include "hd_job.h"
#include "hd_kernels.h"
#include "hd_late.h"
#include "hd_meet.h"
#include "hd_post.h"
#include "hd_roll.h"
#include "shim.h"

#define BEGIN_S 1.0 /* the engine takes 0 for no time */
#define PATIENCE_S 4.0
#define LATE_S 3.0
#define SPREAD_S 2.0
#define END_S 8.0 /* until then all stay: SMPI cannot send to a rank that has ended */

static int rank, size;

void hd_data_begin(hd_comm *c, hd_job *j) { (void)c, (void)j; }
void hd_votes_begin(hd_comm *c, hd_job *j) { (void)c, (void)j; }
void hd_data_end(hd_comm *c) { (void)c; }
void hd_caucus_free(hd_caucus *k) { (void)k; }

static void add(const void *one, const void *other, void *result, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        ((float *)result)[i] = ((const float *)one)[i] + ((const float *)other)[i];
}

hd_reduce_fn hd_reduce_kernel(int op, int dtype) { return (void)op, (void)dtype, add; }
int hd_scale_div(void *p, int64_t n, int dtype, int64_t by) { return (void)p, (void)n, (void)dtype, (void)by, 1; }
int hd_scale_mul(void *to, const void *from, int64_t n, int dtype, double factor)
{
    return (void)to, (void)from, (void)n, (void)dtype, (void)factor, 1;
}

static void pause_for(double seconds)
{
    const struct timespec t = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    nanosleep(&t, NULL);
}

static int check(double late, int comes, char *text, size_t room)
{
    hd_comm c = {.mpi = MPI_COMM_WORLD, .rank = rank, .size = size, .name = "scale", .check = 1};
    float data[2] = {1, 1};
    hd_job j;
    int code = HD_OK, rc;
    c.node_slot = calloc((size_t)size, sizeof *c.node_slot);
    if (!c.node_slot || hd_post_open(&c, &rc))
        return HD_ERR_MEMORY;
    pause_for(late);
    hd_job_init(&j, &c, HD_ALL_REDUCE, "all_reduce");
    j.dtype = HD_FLOAT32;
    j.redop = HD_SUM;
    j.count = 2;
    j.nout = 1;
    j.out1 = (hd_seg){.ptr = (char *)data, .n = 2};
    j.timeout = PATIENCE_S;
    j.inline_ = 1;
    if (comes)
        code = hd_check_mpi(&c, &j, 7);
    if (!code && comes && (!j.checked.carried || data[0] != (float)size))
        code = HD_ERR_BACKEND;
    snprintf(text, room, "%s", j.text ? j.text : "");
    return code;
}

static int group(char *text, size_t room)
{
    int *ranks = malloc((size_t)size * sizeof *ranks), code;
    hd_roll roll = {.mpi = MPI_COMM_WORLD, .ranks = ranks, .n = size, .rank = rank, .tag = 31, .list = 7, .level = 1};
    roll.until = hd_until(60);
    for (int i = 0; ranks && i < size; i++)
        ranks[i] = i;
    code = hd_roll_call(&roll);
    free(ranks);
    snprintf(text, room, "%s", roll.text);
    return code;
}

static int start(char *text, size_t room)
{
    MPI_Comm made;
    const int code = hd_meet(MPI_COMM_WORLD, hd_until(60), &made, text, room);
    if (!code)
        text[0] = 0;
    return code;
}

int main(int argc, char **argv)
{
    static char text[HD_TEXT];
    const char *what = argc > 1 ? argv[1] : "";
    double begin, late = 0;
    int code;

    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (strstr(what, "-spread"))
        late = SPREAD_S * (rank * 37 % size) / size;
    if (!strcmp(what, "late") && rank == 1)
        late = LATE_S;
    pause_for(BEGIN_S);
    begin = MPI_Wtime();
    if (!strncmp(what, "group", 5) || !strncmp(what, "start", 5)) {
        pause_for(late);
        code = what[0] == 'g' ? group(text, sizeof text) : start(text, sizeof text);
    } else {
        code = check(late, strcmp(what, "absent") || rank != 1, text, sizeof text);
    }
    text[strcspn(text, "\n")] = 0;
    printf("%d %llu %llu %llu %.9f %d %s\n", rank, (unsigned long long)shim_counted.sent,
           (unsigned long long)shim_counted.heard, (unsigned long long)shim_counted.bytes, MPI_Wtime() - begin, code,
           text);
    pause_for(END_S - (MPI_Wtime() - begin));
    MPI_Finalize();
    return 0;
}
