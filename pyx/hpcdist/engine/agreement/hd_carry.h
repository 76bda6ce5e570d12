/* Collectives of a few bytes: their data travels with the entry check. */
#ifndef HD_CARRY_H
#define HD_CARRY_H

#include <stddef.h>

#include "hd_ballot.h"
#include "hd_job.h"

/* What all ranks gave: the contribution of rank r lies at `at + r * apart`. */
typedef struct hd_given {
    const char *at;
    size_t apart;
    size_t skipped; /* bytes of all of them before those that lie at `at` */
    int n;          /* contributions; 1: they are combined already */
    int parity;     /* of the check */
} hd_given;

/* A call of a few bytes per rank, whose data the check moves. */
typedef struct hd_carry {
    int small; /* no rank's contribution is longer than HD_SMALL, as the fingerprint says */
    /* Writes this rank's contribution, before the outcome is known. Returns its end. */
    char *(*give)(const hd_comm *c, const hd_job *j, char *to);
    /* Takes what is for this rank out of the contributions of all. */
    void (*take)(const hd_comm *c, const hd_job *j, const hd_given *from);
} hd_carry;

/* Whether this rank's part of the call is short enough, and how the check then carries it. It does
 * so if that is true of all ranks. */
int hd_carries(const hd_comm *c, const hd_job *j, hd_carry *out);

/* Writes this rank's contribution to the letter of all, in a check between nodes; none if the data
 * of all ranks has no room there. needs: which part of that letter each node needs, where these
 * write to each other. */
void hd_letter_write(const hd_comm *c, const hd_job *j, hd_letter *to, hd_span *needs);
/* Takes what is for this rank out of the letter of all, where all make the same call. 0: there is
 * no letter, on any rank. */
int hd_letter_read(const hd_comm *c, const hd_job *j, const hd_letter *from);

#endif
