/* The ranks of one node in an entry check between nodes. Each brings its vote and its letter; one
 * of them, the speaker, takes part in the rounds for all of them, and the others, who listen, wait
 * for the node's verdict. See hd_check_mpi.c for the rounds.
 *
 * A check is given up by a swap of one word, the stand. The speaker must swap there, too, before
 * it says yes in the second round: so after its yes no rank of the node has given up, and none can
 * any more. A rank that gives up does not wait for the speaker, which may be late or stopped.
 *
 * tests/model/check_nodes.pml checks this protocol. */
#ifndef HD_CAUCUS_H
#define HD_CAUCUS_H

#include <mpi.h>
#include <stddef.h>
#include <stdint.h>

#include "hd_ballot.h"
#include "hd_base.h"
#include "hd_comm.h"

/* The first and the last rank of a node; between them may be others. */
typedef struct hd_stretch {
    int first, last;
} hd_stretch;

typedef struct hd_caucus {
    int nodes;           /* of the group */
    int *node_of;        /* of each rank of the group: its speaker's rank among them */
    hd_stretch *stretch; /* of each node */
    int place, ranks;    /* this rank's among those of its node; 0: it speaks */
    MPI_Comm speakers;   /* MPI_COMM_NULL on those who listen */
    size_t room;         /* bytes of a letter, at most; the same in the whole group */
    struct hd_hall *at;  /* the memory that the node shares */
    size_t bytes;
} hd_caucus;

/* Bytes of a letter for which there is room, where so many share the memory. */
size_t hd_caucus_room(int ranks);
/* Of the memory that so many share, zero at first. */
size_t hd_caucus_bytes(int ranks, size_t room);

static inline int hd_caucus_speaks(const hd_caucus *k) { return k->place == 0; }

/* This rank has reached check n, with that vote, which a speaker keeps to itself. */
void hd_caucus_arrive(hd_caucus *k, uint64_t n, const hd_first *mine);
/* Lets a rank that listens see on which cores it and the speaker run. */
void hd_caucus_cores(const hd_caucus *k, hd_waiter *w);

/* For the speaker. Whether all ranks of the node have reached check n; then their votes; then a yes
 * for all of them. The last two return 0 if the check was given up. */
int hd_caucus_complete(const hd_caucus *k, uint64_t n);
int hd_caucus_gather(hd_caucus *k, uint64_t n, hd_first *into);
int hd_caucus_speak(hd_caucus *k, uint64_t n);
/* How the check ended for the node; NULL: not well. */
void hd_caucus_conclude(hd_caucus *k, uint64_t n, const hd_first *outcome);

int hd_caucus_give_up(hd_caucus *k, uint64_t n); /* 0: the speaker has spoken */
int hd_caucus_spoken(const hd_caucus *k, uint64_t n);
int hd_caucus_given_up(const hd_caucus *k, uint64_t n);
/* What a rank that listens sees: 1: *out is the outcome, until this rank reaches the next check; 0:
 * nothing yet; -1: the check has failed. */
int hd_caucus_listen(const hd_caucus *k, uint64_t n, const hd_first **out);

#endif
