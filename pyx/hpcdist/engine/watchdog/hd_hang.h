/* The hang report: for each rank of this node what it does, since when, and its stacks. The hung
 * threads need not help: the ranks' watchdogs do. */
#ifndef HD_HANG_H
#define HD_HANG_H

#include "hd_base.h"
#include "hd_comm.h"

/* Set once, before the first session: whether reports are written. */
void hd_hang_wish(int on);

/* Asks all ranks of the node for their stacks, which are there some 100 ms later. Every 50 ms by a
 * wait, with the seconds that are left to it; it asks shortly before its end. */
void hd_hang_expect(hd_session *s, double left);

/* Where the program of the rank in `slot` is: ", now at load.py:12 in read". */
void hd_hang_say_where(hd_session *s, int slot, hd_text *t);

/* Writes the report to stderr, unless a rank of the node has just done so. why: its first
 * line is quoted. watchdog: it is the caller, and answers for this rank itself. */
void hd_hang_report(hd_session *s, const char *why, int watchdog);

/* From now on that signal asks for a report, unless the program has a handler for it. */
void hd_hang_on_signal(int number);
/* By the watchdog, on each tick: reports if a signal has asked. */
void hd_hang_look(hd_session *s);

#endif
