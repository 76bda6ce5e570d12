/* The entry check of ranks on several nodes: pyx/hpcdist/engine/agreement/hd_check_mpi.c, hd_rounds.c.
 *
 * RANKS ranks go through CHECKS checks in turn. A round is an all-reduce: a rank may find it ended at any moment after
 * all have taken part, or much later, or never. One that leaves sends void ballots in the place of those that are due:
 * they may reach any rank, or none, whether all have come or not. A note may be read at any moment after it was sent.
 * Notes go to the ranks 1 and 2 behind, and whoever leaves because of one passes it on: with 4 ranks not all hear of
 * it from its author. The checker tries all orders, so a rank that is late, stopped or dead is among them. A rank may give up whenever it
 * waits in the first round, and goes on to the next check: that is a retry. In the first PASSES checks it may refuse.
 *
 * The invariant, asserted where a rank returns: for each check either all ranks that return a result return the right
 * one, or every rank that returns at all returns an error. A result is right if all ranks have joined. No rank waits
 * for ever for a rank that has left; with NEVER also if no void ballot of a second round arrives.
 *
 * FAST=k: at level fast, where each k-th check has no letter. In a check with one, some ranks may return a result and
 * others an error, but then no rank returns a result of any later one; and no rank returns an error unless some rank
 * has given up or refused, or did so in a check before of which others have returned a result.
 *
 * tests/model/run.py says which sizes are checked. It also checks that each of these mutations is caught:
 *   ONCE   goes on when the first round has ended;
 *   LATER  takes a note of a later check, in the second round too, for one that its sender has abandoned this one;
 *   APART  goes on, although ranks have not all gone on from the checks before (with FAST);
 *   LAST   looks at the check before alone (with FAST);
 *   FICKLE gives up in the second round;
 *   MUTE   does not pass notes on (with NEVER). */

#ifndef RANKS
#define RANKS 3
#endif
#ifndef CHECKS
#define CHECKS 2
#endif
#ifndef PASSES
#define PASSES 1
#endif
#ifdef FAST
#define SHORT (n % FAST != 0) /* this check has a letter, and so one round */
#else
#define SHORT false
#endif

byte joined[CHECKS]; /* how many ranks take part in the first round */
byte yes[CHECKS];    /* and have said so in the second one, */
byte no[CHECKS];     /* or the contrary: with them go the void ballots */
bool refused[CHECKS];
byte told[CHECKS];   /* bits of the ranks that have a note: a rank has given up this check, or refused */
byte noted[RANKS];   /* the last check from which a rank has sent a note of any kind */

/* What the ballots of the first round say of the checks before, a bit each; and to whom a rank has said that the ranks
 * are apart. */
byte went[CHECKS], stayed[CHECKS];
byte apart;

/* Ghosts: how each check ended, and whether some rank has had a reason to end it. */
bool result[CHECKS];
bool error[CHECKS];
bool reason[CHECKS];

#define BIT (1 << (n - 1))
#define ENDED(k, how) (n > k && result[k - 1] && how[k - 1])
#if CHECKS == 1
#define BEFORE(how) false
#elif CHECKS == 2
#define BEFORE(how) ENDED(1, how)
#elif CHECKS == 3
#define BEFORE(how) (ENDED(1, how) || ENDED(2, how))
#else
#define BEFORE(how) (ENDED(1, how) || ENDED(2, how) || ENDED(3, how))
#endif

#define RETURN_RESULT d_step { \
    assert((SHORT || !error[n - 1]) && joined[n - 1] == RANKS && !refused[n - 1] && !BEFORE(error)); \
    result[n - 1] = true; mine = mine | BIT; n++ }
#define RETURN_ERROR d_step { \
    assert((SHORT || !result[n - 1]) && (reason[n - 1] || BEFORE(reason))); \
    error[n - 1] = true; n++ }

#ifdef LAST
#define SAID (BIT >> 1)
#else
#define SAID (BIT - 1)
#endif
#define JOIN \
    joined[n - 1]++; \
    went[n - 1] = went[n - 1] | mine & SAID; \
    stayed[n - 1] = stayed[n - 1] | ~mine & SAID
#ifdef APART
#define DIFFERS false
#else
#define DIFFERS ((went[n - 1] & stayed[n - 1]) != 0)
#endif

#define SAY_NO no[n - 1]++

#define TELL told[n - 1] = told[n - 1] | 1 << (me + 1) % RANKS | 1 << (me + 2) % RANKS
#ifdef MUTE
#define PASS_ON skip
#else
#define PASS_ON TELL
#endif
#define TOLD (told[n - 1] >> me & 1)
/* What tells a rank that the ranks are apart: that another one says so, or has given up the check before. */
#ifdef FAST
#define HEARS (apart >> me & 1 || n > 1 && mine & BIT >> 1 && told[n - 2] >> me & 1)
#else
#define HEARS false
#endif
#define SAY_APART apart = apart | 1 << (me + 1) % RANKS | 1 << (me + 2) % RANKS | 1 << me

/* A note from a later check: its sender has left this one. */
#if RANKS == 2
#define AHEAD (noted[0] > n || noted[1] > n)
#elif RANKS == 3
#define AHEAD (noted[0] > n || noted[1] > n || noted[2] > n)
#else
#define AHEAD (noted[0] > n || noted[1] > n || noted[2] > n || noted[3] > n)
#endif

proctype rank(byte me) {
    byte n = 1, mine = 0; /* mine: bits of the checks from which it has gone on */

begin:
    if
    :: n > CHECKS -> goto done
    :: n <= CHECKS && (apart >> me & 1) ->
        atomic { refused[n - 1] = true; JOIN };
        SAY_NO;
        SAY_APART;
        RETURN_ERROR;
        goto begin
    :: n <= PASSES -> /* refuse() */
        atomic { refused[n - 1] = true; reason[n - 1] = true; JOIN };
        SAY_NO;
        atomic { TELL; noted[me] = n };
        RETURN_ERROR;
        goto begin
    :: n <= CHECKS -> atomic { JOIN }
    fi;

first: /* first_round() */
    if
    :: joined[n - 1] == RANKS -> goto second
#ifdef LATER
    :: TOLD || AHEAD || no[n - 1] > 0 -> /* follow() */
#else
    :: TOLD || AHEAD && !SHORT || no[n - 1] > 0 -> /* follow() */
#endif
        SAY_NO;
        PASS_ON;
        RETURN_ERROR;
        goto begin
    :: noted[me] < n -> noted[me] = n; goto first /* announces itself */
    :: HEARS ->
        SAY_NO;
        SAY_APART;
        RETURN_ERROR;
        goto begin
    :: skip -> /* give_up() */
        reason[n - 1] = true;
        SAY_NO;
        atomic { TELL; noted[me] = n };
        RETURN_ERROR;
        goto begin
    fi;

second: /* conclude() */
#ifdef ONCE
    atomic { RETURN_RESULT; goto begin };
#endif
    if
    :: DIFFERS -> SAY_NO; SAY_APART; RETURN_ERROR; goto begin
    :: refused[n - 1] && !DIFFERS -> SAY_NO; PASS_ON; RETURN_ERROR; goto begin
    :: atomic { SHORT && !refused[n - 1] && !DIFFERS -> RETURN_RESULT; goto begin }
    :: !SHORT && !refused[n - 1] && !DIFFERS
    fi;
    yes[n - 1]++;
    if /* second_round() */
    :: atomic { yes[n - 1] == RANKS -> RETURN_RESULT; goto begin }
#ifndef NEVER
    :: no[n - 1] > 0 -> PASS_ON; RETURN_ERROR; goto begin
#endif
    :: TOLD -> PASS_ON; RETURN_ERROR; goto begin
#ifdef FICKLE
    :: atomic { skip -> RETURN_ERROR; goto begin }
#endif
#ifdef LATER
    :: atomic { AHEAD -> RETURN_ERROR; goto begin }
#endif
    fi;

done:
    skip
}

init {
    byte p = 0;
    atomic {
        do
        :: p < RANKS -> run rank(p); p++
        :: else -> break
        od
    }
}
