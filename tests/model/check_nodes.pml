/* The entry check of nodes with several ranks each: pyx/hpcdist/engine/agreement/hd_caucus.c, hd_check_mpi.c.
 *
 * NODES nodes of EACH ranks go through CHECKS checks in turn; in the first PASSES of them they may refuse. On each node
 * one rank, the speaker, waits until all have arrived and takes part in the rounds of check_mpi.pml for all of them; the
 * others wait for the verdict. Any of them may give up, at any moment, by a swap of the word in which the speaker, too,
 * must swap before it says yes. So after its yes nobody on the node has given up, and all take the verdict.
 *
 * The invariant, asserted where a rank returns: for each check either all ranks that return a result return the right
 * one, or every rank that returns at all returns an error. A result is right if all ranks of all nodes have arrived, and
 * what they brought is of this check. No rank waits for ever.
 *
 * FAST: at level fast, where a check with a letter ends with its first round. Then some ranks may return a result and
 * others an error, but no rank returns a result of the next one; and no data is of a vote that was written meanwhile.
 *
 * tests/model/run.py says which sizes are checked. It also checks that each of these mutations is caught:
 *   EAGER   the speaker says yes without a swap;
 *   HASTY   a rank gives up without a swap;
 *   VERDICT looks at the verdict first, and then whether the check was given up;
 *   TWICE   reads the two halves of the verdict one after the other;
 *   TORN    the speaker sends what it has read, although a rank of its node has given up (with FAST);
 *   FORGOT  once the node is in a later check, takes one that went on for one that was given up. */

#ifndef NODES
#define NODES 2
#endif
#ifndef EACH
#define EACH 2
#endif
#ifndef CHECKS
#define CHECKS 2
#endif
#ifndef PASSES
#define PASSES 0
#endif

#define RANKS (NODES * EACH)

byte arrived[RANKS]; /* the check that a rank has reached, */
byte brought[RANKS]; /* of which check its vote is, */
bool agrees[RANKS];  /* whether it says yes, */
byte ended[RANKS];   /* and how the check before ended for it */

/* Of each node: hd_caucus.stand, one word: the last check for which its speaker has said yes, or that was given up; */
byte stand[NODES];
bool spoken[NODES]; /* which of the two */
/* and hd_caucus.verdict, one word: the last check that went on, and the last one that did not. */
byte decided[NODES], failed[NODES];

/* Of each check: how many nodes take part in the rounds, and how they vote. */
byte joined[CHECKS], yes[CHECKS], no[CHECKS];
bool refused[CHECKS];
bool went[CHECKS], stayed[CHECKS]; /* what the votes say of the check before */

/* Ghosts: how each check ended, and whether a vote was read that is of another one. */
bool result[CHECKS];
bool error[CHECKS];
bool torn[CHECKS];

#define NONE 0
#define WENT 1
#define STAYED 2
#define DIFFERS (went[n - 1] && stayed[n - 1])

#ifdef FAST
#define RETURN_RESULT d_step { \
    assert(!refused[n - 1] && !torn[n - 1] && !(n > 1 && result[n - 2] && error[n - 2])); \
    result[n - 1] = true; last = WENT; n++ }
#define RETURN_ERROR d_step { error[n - 1] = true; last = STAYED; n++ }
#define RETURN_OUTCOME \
    if \
    :: DIFFERS -> RETURN_ERROR \
    :: !DIFFERS -> RETURN_RESULT \
    fi
#else
#define RETURN_RESULT d_step { assert(!error[n - 1] && !refused[n - 1] && !torn[n - 1]); result[n - 1] = true; n++ }
#define RETURN_ERROR d_step { assert(!result[n - 1]); error[n - 1] = true; n++ }
#define RETURN_OUTCOME RETURN_RESULT
#endif

#define OPEN (stand[node] < n)
#define GIVE_UP stand[node] = n; spoken[node] = false
#ifdef FORGOT
#define SPOKEN (stand[node] == n && spoken[node])
#else
#define SPOKEN (stand[node] == n && spoken[node] || stand[node] > n && decided[node] == n)
#endif
#define GIVEN_UP (stand[node] > n || stand[node] == n && !spoken[node])

proctype rank(byte me) {
    byte n = 1, node = me / EACH, r = 0, last = NONE;
    bool speaks = me % EACH == 0, over = false;
    bool all = true, old = true, forward = false, back = false; /* of the votes that the speaker has read */

begin:
    if
    :: n > CHECKS -> goto done
    :: else
    fi;
    if
    :: d_step { brought[me] = n; ended[me] = last; agrees[me] = true }
    :: d_step { n <= PASSES -> brought[me] = n; ended[me] = last; agrees[me] = false } /* refuses */
    fi;
    arrived[me] = n;
    if
    :: !agrees[me] ->
        if
        :: atomic { OPEN -> GIVE_UP }
        :: !OPEN
        fi;
        if
        :: speaks -> goto refuses
        :: else -> RETURN_ERROR; goto begin
        fi
    :: else
    fi;
    if
    :: speaks -> goto gather
    :: else -> goto listen
    fi;

gather: /* the speaker, until all of its node have arrived */
    skip;
    d_step { r = node * EACH; all = true; old = true; forward = false; back = false };
    do
    :: d_step {
        r < (node + 1) * EACH && arrived[r] >= n ->
        all = all && agrees[r];
        old = old && brought[r] == n;
        forward = forward || ended[r] == WENT;
        back = back || ended[r] == STAYED;
        r++
    }
    :: r < (node + 1) * EACH && GIVEN_UP -> goto refuses
    :: atomic { r < (node + 1) * EACH && OPEN -> GIVE_UP; goto refuses }
    :: r == (node + 1) * EACH -> break
    od;
#ifndef TORN
    if
    :: GIVEN_UP -> goto refuses
    :: !GIVEN_UP
    fi;
#endif
    atomic {
        refused[n - 1] = refused[n - 1] || !all;
        torn[n - 1] = torn[n - 1] || !old;
        went[n - 1] = went[n - 1] || forward;
        stayed[n - 1] = stayed[n - 1] || back;
        joined[n - 1]++
    };

first:
    if
    :: joined[n - 1] == NODES && !refused[n - 1] -> goto speak
    :: joined[n - 1] == NODES && refused[n - 1] -> goto leaves
    :: GIVEN_UP || no[n - 1] > 0 -> goto leaves /* a void ballot */
    :: atomic { OPEN -> GIVE_UP; goto leaves } /* or hears that another node has */
    fi;

speak:
#ifdef EAGER
    atomic { stand[node] = n; spoken[node] = true };
#else
    if
    :: atomic { OPEN -> stand[node] = n; spoken[node] = true }
    :: GIVEN_UP -> goto leaves
    fi;
#endif
#ifdef FAST
    atomic { decided[node] = n; failed[node] = n - 1 };
    RETURN_OUTCOME;
    goto begin;
#endif
    yes[n - 1]++;
    if /* the second round */
    :: yes[n - 1] == NODES -> atomic { decided[node] = n; failed[node] = n - 1 }; RETURN_RESULT; goto begin
    :: no[n - 1] > 0 -> failed[node] = n; RETURN_ERROR; goto begin /* it has ended, or a note says so */
    fi;

refuses: /* not all of its node may be here: nobody goes on to vote */
    atomic { refused[n - 1] = true; joined[n - 1]++ };
leaves:
    no[n - 1]++;
    failed[node] = n;
    RETURN_ERROR;
    goto begin;

listen: /* all others */
    over = GIVEN_UP;
    if
#ifdef TWICE
    :: decided[node] == n -> RETURN_OUTCOME; goto begin
    :: over || failed[node] >= n -> RETURN_ERROR; goto begin
#elif defined(VERDICT)
    :: atomic { decided[node] == n -> RETURN_OUTCOME; goto begin }
    :: atomic { decided[node] != n -> over = failed[node] >= n };
        if
        :: over || GIVEN_UP -> RETURN_ERROR; goto begin
        :: else -> goto listen
        fi
#else
    :: atomic { decided[node] == n -> RETURN_OUTCOME; goto begin }
    :: atomic { decided[node] != n && (over || failed[node] >= n) -> RETURN_ERROR; goto begin }
#endif
#ifdef HASTY
    :: RETURN_ERROR; goto begin
#else
    :: atomic { OPEN -> GIVE_UP; RETURN_ERROR; goto begin }
#endif
    :: atomic { !OPEN && !SPOKEN -> RETURN_ERROR; goto begin } /* somebody has, or is in a later check */
    :: decided[node] != n && !over && failed[node] < n && !OPEN -> goto listen
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
