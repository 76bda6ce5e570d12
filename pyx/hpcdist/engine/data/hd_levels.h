/* Collectives over two levels, between nodes with several ranks each: see hd_levels.c. */
#ifndef HD_LEVELS_H
#define HD_LEVELS_H

#include <mpi.h>
#include <stdint.h>

#include "hd_base.h"
#include "hd_job.h"

typedef struct hd_levels_line {
    uint64_t in __attribute__((aligned(HD_LINE)));  /* pieces */
    uint64_t out __attribute__((aligned(HD_LINE))); /* pieces */
} hd_levels_line;

typedef struct hd_levels_seat {
    int node, place; /* the node's rank in all rails; the place among the members on that node */
} hd_levels_seat;

/* Blocks, one for each member, lie by rails, on a rail by nodes, and then by places. */

struct hd_levels {
    MPI_Comm rail; /* this and the next ones as in hd_split */
    int place, ranks, rails, even;
    int nodes;
    hd_levels_seat *seats; /* of each member */
    int *at;               /* where the block of each member lies among all */
    int *start;            /* where those of each rail and node begin; and the end of the last */
    int most;              /* blocks of one node on one rail */
    int *lists;            /* what MPI reads during two calls that take counts of blocks */
    hd_levels_line *lines; /* one per rank of the node; then, from the next page on, the slots */
    char *slots;
    size_t bytes;
    int64_t piece; /* bytes of a part of a slot */
    uint64_t done; /* pieces */
    int failed;    /* MPI did in the middle of a tensor: pieces are not counted alike any more */
};

/* One tensor, or a block of it for each rank: an operation fills in the first part. */
typedef struct hd_levels_run hd_levels_run;
struct hd_levels_run {
    /* Piece k before the call on the rail, which makes the request, and after it. */
    int (*begin)(hd_levels_run *r, int64_t k, MPI_Request *rail);
    int (*end)(hd_levels_run *r, int64_t k);
    char *in, *out;
    const hd_seg *list; /* the blocks; NULL: they lie behind each other */

    hd_comm *c;
    hd_job *j;
    struct hd_levels *l;
    int64_t n;            /* elements, or those of a block */
    int64_t item, step;   /* bytes of an element; elements of a piece */
    uint64_t before;      /* pieces of earlier tensors */
    MPI_Request rails[2]; /* of even and of odd pieces */
};

enum hd_levels_of { HD_LEVELS_IN, HD_LEVELS_OUT };

/* HPCDIST_TWO_LEVEL. */
enum hd_levels_setting { HD_LEVELS_OFF, HD_LEVELS_ON, HD_LEVELS_AUTO };
enum hd_levels_setting hd_levels_wanted(void);

/* Whether j goes that way, which has n elements in all; divided: they are blocks for each rank. The
 * first such call allocates memory, which is collective. All ranks get the same answer. -1: the job
 * has failed. */
int hd_levels_takes(hd_comm *c, hd_job *j, int64_t n, int divided);

/* All pieces of n elements, of which a slot has room for so many blocks. */
int hd_levels_go(hd_levels_run *r, hd_comm *c, hd_job *j, int64_t n, int blocks);

void hd_levels_announce(const hd_levels_run *r, enum hd_levels_of which, int64_t k);
/* Until one rank of the node has announced piece k, or all others. */
int hd_levels_wait(hd_levels_run *r, int place, enum hd_levels_of which, int64_t k);
int hd_levels_wait_all(hd_levels_run *r, enum hd_levels_of which, int64_t k);

char *hd_levels_slot(const hd_levels_run *r, int place, int64_t k); /* its part for piece k */
int64_t hd_levels_length(const hd_levels_run *r, int64_t k);        /* of a piece, in elements */
/* The rail that carries a member's block: that of its place, or, where this is beyond the rails, of
 * an earlier one. */
static inline int hd_levels_rail(const struct hd_levels *l, int member)
{
    return l->seats[member].place % l->rails;
}
/* Where the blocks of a rail and a node begin on the rail, and how many there are. */
static inline int hd_levels_begins(const struct hd_levels *l, int rail, int node)
{
    return l->start[rail * l->nodes + node] - l->start[rail * l->nodes];
}
static inline int hd_levels_blocks(const struct hd_levels *l, int rail, int node)
{
    return l->start[rail * l->nodes + node + 1] - l->start[rail * l->nodes + node];
}
/* Room for four lists of an int for each node, for the call of piece k. */
static inline int *hd_levels_lists(const struct hd_levels *l, int64_t k)
{
    return l->lists + (k & 1) * 4 * l->nodes;
}

/* The first element of the slice, of n elements, of the ranks at that place. */
int64_t hd_levels_slice(const hd_levels_run *r, int64_t n, int place);

/* Frees the memory; and later the rest. */
void hd_levels_close(hd_comm *c);
void hd_levels_free(hd_comm *c);
int64_t hd_levels_bytes(const hd_comm *c); /* of memory; 0: there is none */

#endif
