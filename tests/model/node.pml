/* all_reduce and reduce through a node's memory: the protocol of pyx/hpcdist/engine/data/hd_node.c. Every second operation
 * is a reduce: the other ranks read no result, and put what they have for their own slice, scaled, into the half of
 * the slot that is not this piece's.
 *
 * -DR=ranks -DOPS=operations -DPIECES=pieces of each, -DCHECKED=1: the ranks agree before each operation.
 *
 * -DSLOTS=1: the operations of hd_slots.c instead, with one meeting per piece and `out` behind the last one. By turns
 * all ranks give to all (all_to_all, all_gather, reduce_scatter), one gives to the others (broadcast, scatter), the
 * others give to one (gather, reduce).
 *
 * A rank that is stopped, delayed or dead is one that takes no step for a while, or for ever. The clock is a
 * choice: whoever has found a peer behind may give up, at any later moment. Ctrl-C and a peer that has gone
 * are the same to the others.
 *
 * For each operation, at any moment: no rank has returned a result where another has returned an error, no rank
 * takes MPI where another takes the memory, and nobody reads what is not what it should be.
 *
 * MUTANT=1 to 7 are faults that must be found; with SLOTS, 1 and 3 to 6. */
#ifndef R
#define R 3
#endif
#ifndef OPS
#define OPS 2
#endif
#ifndef PIECES
#define PIECES 2
#endif
#ifndef CHECKED
#define CHECKED 1
#endif
#ifndef MUTANT
#define MUTANT 0
#endif

#ifndef SLOTS
#define SLOTS 0
#endif

#if MUTANT == 4
#define HALVES 1
#else
#define HALVES 2
#endif
#define SLOT(q, k) ((q) * HALVES + (k) % HALVES)

mtype = { none, result, error, mpi };
mtype outcome[OPS * R] = none; /* by operation and rank */

/* The segment. `veto` is the upper part of the word `out`: both are read and swapped together. */
byte in[R], out[R];
bit veto[R];
byte broken; /* 1 + the piece that was given up */

/* What the slots hold: 1 + the piece, 0 while it is written. And who reads which half: 1 + it. */
byte given[R * HALVES], reduced[R * HALVES];
byte reads_given[R], reads_reduced[R];

#if CHECKED
byte came[OPS];
bit passed[OPS], abandoned[OPS];
#endif

#define FOR_OTHERS(claim) \
	d_step { i = 0; do :: i < R -> assert(i == me || (claim)); i++ :: else -> break od; i = 0 }
#define NOBODY_READS(reads, k) FOR_OTHERS(reads[i] != (k) % HALVES + 1)
#define ALL_HOLD(what, k) FOR_OTHERS(what[SLOT(i, k)] == (k) + 1)

#define ROOT (op % R)
#define GETS_NONE (op % 2 == 1 && me != ROOT)
#define GIVES(q) (op % 3 == 0 || (op % 3 == 1) == ((q) == ROOT))
#define TAKES(q) (op % 3 == 0 || (op % 3 == 1) == ((q) != ROOT))
#define GIVERS_HOLD(k) FOR_OTHERS(!GIVES(i) || given[SLOT(i, k)] == (k) + 1)

inline ends(what)
{
	d_step {
		outcome[op * R + me] = what;
		i = 0;
		do
		:: i < R ->
			assert(outcome[op * R + i] == none || outcome[op * R + i] == what);
			i++
		:: else -> break
		od;
		i = 0
	}
}

/* untouched(): the half of the next piece, before that begins. */
inline scale()
{
	if
	:: GETS_NONE ->
		atomic { NOBODY_READS(reads_given, done + 1); NOBODY_READS(reads_reduced, done + 1);
			reduced[SLOT(me, done + 1)] = 0 }
	:: else
	fi
}

/* veto(): keeps one rank from saying `out`, unless all have said it. */
inline put_veto()
{
	i = 0;
	do
	:: i == R -> break
	:: i < R ->
		atomic {
			assert(out[i] >= done);
			if
			:: out[i] > done -> i++
			:: out[i] == done && veto[i] -> goto failed
			:: out[i] == done && !veto[i] -> veto[i] = 1; goto mark
			fi
		}
	od;
	i = 0
}

proctype rank(byte me)
{
	byte op, done, k, q, i;
#if SLOTS
	byte g; /* pieces */
#endif
	bit told;

	do
	:: op == OPS -> goto over
	:: op < OPS ->
#if CHECKED
		/* hd_check(): all agree to begin, or all agree that this call has failed. */
		atomic { came[op]++; if :: came[op] == R && !abandoned[op] -> passed[op] = 1 :: else fi }
		if
		:: passed[op]
		:: atomic { !passed[op] -> abandoned[op] = 1; goto next }
		fi;
#endif
		/* hd_node_takes() */
		if
		:: told -> ends(mpi); goto next
		:: else
		fi;
		if
#if MUTANT == 5
		:: broken -> ends(mpi); goto next
#else
		:: broken && broken - 1 <= done -> goto failed
#endif
		:: else
		fi;

#if SLOTS
		k = 0;
		do
		:: k == PIECES -> break
		:: k < PIECES ->
			if
			:: GIVES(me) ->
				atomic { NOBODY_READS(reads_given, g); given[SLOT(me, g)] = 0 }
				given[SLOT(me, g)] = g + 1
			:: else
			fi;
			in[me] = g + 1;
			q = 0;
			do
			:: q == R -> q = 0; break
			:: q < R && in[q] > g -> q++
			:: q < R && in[q] <= g ->
				if
				:: broken && broken - 1 <= done -> goto failed
				:: in[q] > g
				:: goto mark
				fi
			od;
			if
			:: TAKES(me) ->
				atomic { GIVERS_HOLD(g); reads_given[me] = g % HALVES + 1 }
				atomic { GIVERS_HOLD(g); reads_given[me] = 0 }
			:: else
			fi;
			g++;
			k++
		od;
		atomic {
			if
			:: veto[me] && MUTANT != 6 -> goto failed
			:: else -> out[me] = done + 1
			fi
		}
		q = 0;
		do
		:: q == R -> q = 0; break
		:: q < R && out[q] > done -> q++
		:: q < R && out[q] <= done ->
			if
			:: broken && broken - 1 <= done -> goto failed
			:: out[q] > done
			:: goto late
			fi
		od;
		goto all_out;
late:
#if MUTANT == 1
		goto mark;
#endif
#if MUTANT == 3
		atomic { if :: broken == 0 -> broken = done + 1 :: else fi }
#endif
		put_veto();
all_out:
		done++;
#else
		k = 0;
		do
		:: k == PIECES -> break
		:: k < PIECES ->
			/* 1. give */
			atomic { NOBODY_READS(reads_given, done); given[SLOT(me, done)] = 0; reduced[SLOT(me, done)] = 0 }
			given[SLOT(me, done)] = done + 1;
#if MUTANT == 7
			scale();
#endif
			in[me] = done + 1;
			q = 0;
			do
			:: q == R -> q = 0; break
			:: q < R && in[q] > done -> q++
			:: q < R && in[q] <= done -> /* wait_slowly() */
				if
				:: broken && (MUTANT == 2 || broken - 1 <= done) -> goto failed
				:: in[q] > done
				:: goto mark /* gives up: never says `out` */
				fi
			od;

			/* 2. combine, and put the result down */
#if MUTANT != 7
			scale();
#endif
			atomic { ALL_HOLD(given, done); reads_given[me] = done % HALVES + 1 }
			atomic { ALL_HOLD(given, done); reads_given[me] = 0 }
			atomic { NOBODY_READS(reads_reduced, done); reduced[SLOT(me, done)] = 0 }
			reduced[SLOT(me, done)] = done + 1;
			atomic {
				if
				:: veto[me] && MUTANT != 6 -> goto failed
				:: else -> out[me] = done + 1
				fi
			}
			q = 0;
			do
			:: q == R -> q = 0; break
			:: q < R && out[q] > done -> q++
			:: q < R && out[q] <= done ->
				if
				:: broken && (MUTANT == 2 || broken - 1 <= done) -> goto failed
				:: out[q] > done
				:: goto late
				fi
			od;
			goto copy;

late:			/* gives up, having said `out` */
#if MUTANT == 1
			goto mark;
#endif
#if MUTANT == 3
			atomic { if :: broken == 0 -> broken = done + 1 :: else fi }
#endif
			put_veto();

copy:			/* 3. */
			q = 0;
			if
			:: GETS_NONE
			:: else ->
				atomic { ALL_HOLD(reduced, done); reads_reduced[me] = done % HALVES + 1 }
				atomic { ALL_HOLD(reduced, done); reads_reduced[me] = 0 }
			fi;
			done++;
			k++
		od;
#endif
		ends(result);
		goto next;

mark:		/* only now does the segment say so */
		atomic { if :: broken == 0 -> broken = done + 1 :: else -> assert(broken == done + 1) fi }
failed:
		told = 1;
		i = 0;
		q = 0;
		ends(error);
next:
		op++
	od;
over:
	skip
}

init
{
	byte r;
	atomic {
		do
		:: r < R -> run rank(r); r++
		:: else -> break
		od
	}
}
