/* Reductions through memory that the ranks of a node share: see hd_node.c. */
#ifndef HD_NODE_H
#define HD_NODE_H

#include <stdint.h>

#include "hd_job.h"
#include "hd_kernels.h"

/* Whether j goes that way, and the reduction of one tensor, in place or into another one, or, on a
 * rank that gets no result, into none. Allocates the memory if there is none yet, which is
 * collective. -1: the job has failed. */
int hd_node_takes(hd_comm *c, hd_job *j);
int hd_node_reduce(hd_comm *c, hd_job *j, const char *from, char *to, int64_t n);
void hd_node_close(hd_comm *c);
int64_t hd_node_bytes(const hd_comm *c); /* 0: there is none */

/* The same meetings without the slots, for hd_direct.c, which reads the ranks' tensors where they
 * lie. */

typedef struct hd_node_run {
    hd_comm *c;
    hd_job *j;
    struct hd_node *node;
    hd_reduce_fn reduce; /* NULL: the job reduces nothing, or there is none */
    int64_t item, until; /* bytes of an element; ns */
    int64_t step;        /* elements of a piece */
} hd_node_run;

/* A tensor in a block of hd_block.h, whichever address it has in a process. */
typedef struct hd_spot {
    uint64_t block;
    int64_t at; /* bytes from where the rank's part begins */
} hd_spot;

int64_t hd_node_least(const hd_comm *c);  /* bytes: shorter operations go another way */
int hd_node_ready(hd_comm *c, hd_job *j); /* 1: there is the memory; 0: not; -1: failed */
void hd_node_begin(hd_node_run *r, hd_comm *c, hd_job *j);
/* Where rank's slice of n elements begins; all but the last are whole cache lines. */
int64_t hd_node_slice(const hd_node_run *r, int64_t n, int rank);
/* All ranks have a tensor ready to be read, at these places. An error: as of the operation. */
int hd_node_meet(hd_node_run *r, hd_spot mine);
hd_spot hd_node_place(const hd_node_run *r, int rank);
/* All ranks have read and written what they are to. */
int hd_node_part(hd_node_run *r);

/* And for hd_slots.c: an operation is a row of pieces with one hd_node_part() at its end. A piece
 * is hd_node_give(), hd_node_wait() and, when the others' slots are read, hd_node_next(). */

char *hd_node_slot(const hd_node_run *r, int rank); /* of this piece: r->step elements */
void hd_node_give(hd_node_run *r);                  /* what this rank has for the others is there */
int hd_node_wait(hd_node_run *r);                   /* what they have is there */
void hd_node_next(hd_node_run *r);

#endif
