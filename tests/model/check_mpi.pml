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
 * tests/model/run.py says which sizes are checked. It also checks that each of these mutations is caught:
 *   ONCE   goes on when the first round has ended;
 *   LATER  takes a note of a later check, in the second round too, for one that its sender has abandoned this one;
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

byte joined[CHECKS]; /* how many ranks take part in the first round */
byte yes[CHECKS];    /* and have said so in the second one, */
byte no[CHECKS];     /* or the contrary: with them go the void ballots */
bool refused[CHECKS];
byte told[CHECKS];   /* bits of the ranks that have a note: a rank has given up this check, or refused */
byte noted[RANKS];   /* the last check from which a rank has sent a note of any kind */

/* Ghosts: how each check ended. */
bool result[CHECKS];
bool error[CHECKS];

#define RETURN_RESULT d_step { assert(!error[n - 1] && joined[n - 1] == RANKS); result[n - 1] = true; n++ }
#define RETURN_ERROR d_step { assert(!result[n - 1]); error[n - 1] = true; n++ }

#define SAY_NO no[n - 1]++

#define TELL told[n - 1] = told[n - 1] | 1 << (me + 1) % RANKS | 1 << (me + 2) % RANKS
#ifdef MUTE
#define PASS_ON skip
#else
#define PASS_ON TELL
#endif
#define TOLD (told[n - 1] >> me & 1)

/* A note from a later check: its sender has left this one. */
#if RANKS == 2
#define AHEAD (noted[0] > n || noted[1] > n)
#elif RANKS == 3
#define AHEAD (noted[0] > n || noted[1] > n || noted[2] > n)
#else
#define AHEAD (noted[0] > n || noted[1] > n || noted[2] > n || noted[3] > n)
#endif

proctype rank(byte me) {
    byte n = 1;

begin:
    if
    :: n > CHECKS -> goto done
    :: n <= PASSES -> /* refuse() */
        atomic { refused[n - 1] = true; joined[n - 1]++ };
        SAY_NO;
        atomic { TELL; noted[me] = n };
        RETURN_ERROR;
        goto begin
    :: n <= CHECKS -> joined[n - 1]++
    fi;

first: /* first_round() */
    if
    :: joined[n - 1] == RANKS -> goto second
    :: TOLD || AHEAD || no[n - 1] > 0 -> /* follow() */
        SAY_NO;
        PASS_ON;
        RETURN_ERROR;
        goto begin
    :: noted[me] < n -> noted[me] = n; goto first /* announces itself */
    :: skip -> /* give_up() */
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
    :: refused[n - 1] -> SAY_NO; PASS_ON; RETURN_ERROR; goto begin
    :: else
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
