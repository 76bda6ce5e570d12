/* The entry check of the ranks of a node: pyx/hpcdist/engine/agreement/hd_page.c, and the way hd_check.c uses it.
 *
 * RANKS ranks go through CHECKS checks in turn. Any rank may be slow at any moment, for ever if need be: that is a
 * rank that is late, stopped or dead, because the checker tries all orders of all steps. A rank may give up whenever
 * it waits, as after a timeout, a signal or a peer's death, and goes on to the next check: that is a retry. In the
 * first PASSES checks it may also refuse to take part.
 *
 * Each access to memory that another rank may write or read is a step of its own. The invariant, asserted where a
 * rank returns: for each check either all ranks that return a result return the right one, or every rank that
 * returns at all returns an error. A result is right if the fields that were read belong to the check. The data that
 * travels with the check is read a second time, when all have joined, while the others may go on.
 *
 * tests/model/run.py says which sizes are checked. It also checks that each of these mutations is caught:
 *   EARLY   publishes without looking whether the others have left the fields;
 *   FORGET  takes a rank that has gone on for one that joined;
 *   BLIND   takes a rank that passed for one that joined;
 *   LATE    takes the data after it has reached the next check. */

#ifndef RANKS
#define RANKS 3
#endif
#ifndef CHECKS
#define CHECKS 3
#endif
#ifndef PASSES
#define PASSES 1
#endif

byte reached[RANKS];      /* hd_slot.word: the check this rank has reached, */
bool joined[RANKS];    /*   whether it joined it, */
byte veto[RANKS];      /*   and up to where it is vetoed; the three change in one swap */
byte decided[RANKS];   /* hd_slot.decided */
byte field[RANKS * 2]; /* hd_slot.d: the check whose fields lie there */

/* Ghosts: how each check ended. */
bool result[CHECKS + 1];
bool error[CHECKS + 1];

#define FIRST ((me + 1) % RANKS)
#define NEXT ((r + 1) % RANKS)

/* The end of a check, and the beginning of the next. */
#define RETURN_RESULT d_step { assert(!error[n]); result[n] = true; mine = n; n++; r = FIRST }
#define RETURN_ERROR d_step { assert(!result[n]); error[n] = true; n++; r = FIRST }

/* hd_page_pass, and hd_page_join where it finds a veto. */
#define PASS \
    if :: decided[me] != mine -> decided[me] = mine :: else fi; \
    d_step { joined[me] = false; reached[me] = n; if :: veto[me] < n -> veto[me] = n :: else fi }

proctype rank(byte me) {
    byte n = 1, r = FIRST, mine = 0;
    bool any = false;

begin:
    if
    :: n > CHECKS -> goto done
    :: n <= PASSES -> /* refuse() */
        PASS;
        RETURN_ERROR;
        goto begin
    :: n <= CHECKS -> skip
    fi;

#ifndef EARLY
    if
    :: mine == n - 1 -> goto publish
    :: else
    fi;
behind: /* wait_to_publish() */
    if
    :: atomic { r == me -> r = FIRST; goto publish }
    :: r != me && reached[r] >= n - 1 -> r = NEXT; goto behind
    :: r != me -> /* finds a veto, or gives up: it may do so at any moment */
        PASS;
        RETURN_ERROR;
        goto begin
    fi;
publish:
#endif
    field[me * 2 + n % 2] = n;
    if
    :: decided[me] != mine -> decided[me] = mine
    :: else
    fi;
    atomic { /* hd_page_join() */
        if
        :: veto[me] >= n -> joined[me] = false; reached[me] = n; RETURN_ERROR; goto begin
        :: else -> joined[me] = true; reached[me] = n; veto[me] = n - 1
        fi
    };

wait: /* wait_for(), hd_page_look() */
    if
    :: atomic { r == me -> r = FIRST; goto take }
#ifdef BLIND
    :: atomic { r != me && reached[r] == n -> goto read }
#else
    :: atomic { r != me && reached[r] == n && joined[r] -> goto read }
    :: atomic { r != me && reached[r] == n && !joined[r] -> RETURN_ERROR; goto begin }
#endif
#ifdef FORGET
    :: atomic { r != me && reached[r] > n -> goto read }
#else
    :: r != me && reached[r] > n -> /* then a second load */
        if
        :: decided[r] == n -> goto read
        :: atomic { else -> RETURN_ERROR; goto begin }
        fi
#endif
    :: atomic { r != me && reached[r] < n && veto[r] >= n -> RETURN_ERROR; goto begin }
    :: atomic { r != me && reached[r] < n && veto[r] < n -> r = FIRST; any = false } /* gives up, unless all have arrived */
    fi;

vetoes: /* hd_page_veto() */
    if
    :: atomic { r == me && any -> any = false; RETURN_ERROR; goto begin }
    :: atomic { r == me && !any -> r = FIRST; goto wait } /* looks at all again: it forgets nothing by that */
    :: atomic { r != me && reached[r] < n ->
            any = true;
            if
            :: veto[r] < n -> veto[r] = n
            :: else
            fi;
            r = NEXT;
            goto vetoes }
    :: atomic { r != me && reached[r] >= n -> r = NEXT; goto vetoes }
    fi;

read:
    atomic { assert(field[r * 2 + n % 2] == n); r = NEXT; goto wait } /* nobody has touched what is read here */

take: /* take(), in hd_check.c */
#ifdef LATE
    if
    :: atomic { r == FIRST -> decided[me] = n; joined[me] = true; reached[me] = n + 1 }
    :: r != FIRST
    fi;
#endif
    if
    :: atomic { r == me -> RETURN_RESULT; goto begin }
    :: atomic { r != me -> assert(field[r * 2 + n % 2] == n); r = NEXT; goto take }
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
