/* Memory that the ranks of a node share, and their meetings there: see hd_node.c. */
#ifndef HD_NODE_H
#define HD_NODE_H

#include <stdint.h>

#include "hd_job.h"
#include "hd_kernels.h"

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
    int streams;         /* the result is written past the caches */
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
char *hd_node_other_half(const hd_node_run *r);     /* of this rank's slot: not of this piece */
void hd_node_give(hd_node_run *r);                  /* what this rank has for the others is there */
int hd_node_wait(hd_node_run *r);                   /* what they have is there */
void hd_node_next(hd_node_run *r);
/* Copies n elements of a result to where they belong. */
void hd_node_put(const hd_node_run *r, char *to, const char *from, int64_t n);

#endif
