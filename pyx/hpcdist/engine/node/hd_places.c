/* HPCDIST_NODES: see hd_places.h. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hd_base.h"
#include "hd_places.h"

#define SHOWN 64           /* bytes of the variable's text in an error */
#define MOST_NODES 1000000 /* a larger number is a mistake */

enum { NOTHING = -1, WRONG = -2 };

/* Reads a number, and moves to the character behind it. */
static long number(const char **at)
{
    char *end;
    long n;
    while (**at == ' ')
        ++*at;
    if (**at < '0' || **at > '9')
        return WRONG;
    n = strtol(*at, &end, 10);
    while (*end == ' ')
        end++;
    *at = end;
    return n <= MOST_NODES ? n : WRONG;
}

/* Of `size` ranks on `nodes` nodes, in blocks; the first nodes have one more. */
static int in_blocks(int rank, int size, int nodes)
{
    const int least = size / nodes, longer = size % nodes, behind = rank - longer * (least + 1);
    if (nodes >= size)
        return rank;
    return behind < 0 ? rank / (least + 1) : longer + behind / least;
}

static int place_of(const char *text, int rank, int size)
{
    long n = number(&text), own = rank == 0 ? n : WRONG;
    int count = 1;
    if (n != WRONG && !*text)
        return n < 1 ? WRONG : in_blocks(rank, size, (int)n);
    for (; n != WRONG && *text == ','; count++) {
        text++;
        n = number(&text);
        if (count == rank)
            own = n;
    }
    return n == WRONG || *text || count != size ? WRONG : (int)own;
}

static void say_value(hd_text *t, const char *value, int rank)
{
    if (*value)
        hd_say(t, "'%s' on rank %d", value, rank);
    else
        hd_say(t, "not set on rank %d", rank);
}

/* Some rank's text makes no sense, or two differ. */
static int refuse(MPI_Comm ctl, const char *text, uint64_t hash, int wrong, hd_text *t)
{
    char first[SHOWN] = "", other[SHOWN] = "";
    int rank, size, who, job;

    MPI_Comm_rank(ctl, &rank);
    MPI_Comm_size(ctl, &size);
    MPI_Comm_size(MPI_COMM_WORLD, &job);
    snprintf(first, sizeof first, "%s", text);
    snprintf(other, sizeof other, "%s", text);
    if (wrong >= 0) {
        MPI_Bcast(other, SHOWN, MPI_CHAR, wrong, ctl);
        hd_say(t, "HPCDIST_NODES is ");
        say_value(t, other, wrong);
        hd_say(t,
               ": it takes a number of nodes, of at least 1, or for each of the job's %d ranks the "
               "number of its node, as in 0,0,1",
               job);
        return HD_ERR_MISMATCH;
    }
    uint64_t theirs = hash;
    MPI_Bcast(&theirs, 1, MPI_UINT64_T, 0, ctl);
    who = theirs == hash ? size : rank;
    MPI_Allreduce(MPI_IN_PLACE, &who, 1, MPI_INT, MPI_MIN, ctl);
    MPI_Bcast(first, SHOWN, MPI_CHAR, 0, ctl);
    MPI_Bcast(other, SHOWN, MPI_CHAR, who < size ? who : 0, ctl);
    hd_say(t, "HPCDIST_NODES is ");
    say_value(t, first, 0);
    hd_say(t, ", and ");
    say_value(t, other, who);
    hd_say(t, ": give it the same value on all ranks");
    return HD_ERR_MISMATCH;
}

int hd_place(MPI_Comm ctl, int *place, hd_text *t)
{
    const char *text = getenv("HPCDIST_NODES");
    uint64_t said[3], hash;
    int rank, size, job_rank, job, rc;

    text = text ? text : "";
    text += strspn(text, " ");
    hash = hd_hash_text(text);
    MPI_Comm_rank(ctl, &rank);
    MPI_Comm_size(ctl, &size);
    MPI_Comm_rank(MPI_COMM_WORLD, &job_rank);
    MPI_Comm_size(MPI_COMM_WORLD, &job);
    *place = *text ? place_of(text, job_rank, job) : NOTHING;
    said[0] = hash;
    said[1] = ~hash;
    said[2] = *place == WRONG ? (uint64_t)(size - rank) : 0;
    if ((rc = MPI_Allreduce(MPI_IN_PLACE, said, 3, MPI_UINT64_T, MPI_MAX, ctl))) {
        hd_say(t, "MPI_Allreduce failed (error %d)", rc);
        return HD_ERR_BACKEND;
    }
    if (said[2])
        return refuse(ctl, text, hash, size - (int)said[2], t);
    return said[0] == ~said[1] ? HD_OK : refuse(ctl, text, hash, -1, t);
}
