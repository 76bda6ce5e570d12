/* What all ranks that live agree on: the bitwise and of a value from each, also if some die
 * meanwhile. It takes two of MPI's agreements or more, because the word of one can be lost: where
 * two threads of a process are in MPI, Open MPI (5.0.11, and main in August 2026) may take the low
 * half of an address in its place, on one rank or on all of them. It puts a message aside then, and
 * writes the address of what has come over it (era_cb_fn). */
#ifndef HD_ACCORD_H
#define HD_ACCORD_H

#include <mpi.h>

#define HD_ACCORD_BITS 28 /* of a value */

/* A rank that gives up on one goes on with it later. */
typedef struct hd_accord {
    int begun, going;      /* going: MPI has the word */
    int given, value;      /* what this rank gives; what all agree on */
    int parting;           /* those who hear 0 go at once */
    int known, sure, word; /* this rank has heard the value; the word is whether all have */
    MPI_Request request;
} hd_accord;

void hd_accord_begin(hd_accord *a, int given, int parting);
/* Gives MPI the next word, unless it has one. When the request has ended: hd_accord_heard(). HD_OK,
 * or HD_ERR_BACKEND: MPI has no agreements. */
int hd_accord_say(hd_accord *a, MPI_Comm comm);
/* 1: all agree on the value. 0: there is more to say. */
int hd_accord_heard(hd_accord *a);
/* Of the request: a rank died that it had not been told of, and there is a word nevertheless. */
int hd_accord_has_word(int error);
/* The whole of it: *value becomes what all agree on. Blocks until all that live have called it. */
int hd_accord_reach(MPI_Comm comm, int *value);

#endif
