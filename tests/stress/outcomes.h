/* How the ranks' checks end, and what is wrong with that.
 *
 * Either all ranks that return a result return the right one, or every rank returns an error; a rank whose signal
 * handler raised returns neither. The data has moved on all ranks or on none, and a call that fails has moved none. At
 * level fast a check with a letter may end with data on some ranks and an error on others; then no rank returns a
 * result of any later one. No check fails without a reason: a rank that refuses, disagrees, raises or has little time. */
#ifndef OUTCOMES_H
#define OUTCOMES_H

#include <stdint.h>
#include <stdio.h>

#include "hd_comm.h"
#include "mail.h"

#ifndef LEVEL
#define LEVEL HD_CHECK_ON
#endif

enum { NOTHING, RESULT, CARRIED, ERROR, RAISED };
enum { BETWEEN = 50 }; /* checks, after which the ranks compare */

static uint8_t outcome[BETWEEN][MOST], must_fail[BETWEEN][MOST];
static uint8_t hurried[BETWEEN]; /* its ranks have little time */
static uint64_t done, failed, parted, raised, wrong;

static void say_wrong(int at, const char *what)
{
    static const char *const names[] = {"nothing", "a result", "its data", "an error", "an exception"};
    fprintf(stderr, "check %llu, %s:", (unsigned long long)done + (unsigned)at, what);
    for (int r = 0; r < ranks; r++)
        fprintf(stderr, "%s rank %d got %s", r ? "," : "", r, names[outcome[at][r]]);
    fprintf(stderr, "\n");
    wrong++;
}

/* What is wrong with a check whose ranks got these outcomes; NULL: nothing. `apart`: one before has ended differently
 * on the ranks; 2: perhaps. */
static const char *fault_of(int at, int apart, int seen, int must)
{
    const int went = 1 << RESULT | 1 << CARRIED;
    if (seen & 1 << NOTHING)
        return "of some rank nothing is known";
    if (seen & 1 << RESULT && seen & 1 << CARRIED)
        return "with a letter for some ranks";
    if (seen & went && must)
        return "which must fail";
    if (seen & went && seen & 1 << ERROR && (LEVEL != HD_CHECK_FAST || seen & 1 << RESULT))
        return "mixed";
    if (seen & went && apart == 1)
        return "after one that ended differently on the ranks";
    if (seen & 1 << ERROR && !must && !hurried[at] && !(seen & 1 << RAISED) && !apart)
        return "which nobody had a reason to fail";
    return NULL;
}

static void compare(void)
{
    int apart = 0;
    for (int at = 0; at < BETWEEN; at++) {
        const char *fault;
        int seen = 0, must = 0;
        for (int r = 0; r < ranks; r++) {
            seen |= 1 << outcome[at][r];
            must |= must_fail[at][r];
            raised += outcome[at][r] == RAISED;
        }
        failed += (seen & 1 << ERROR) != 0;
        parted += seen & 1 << CARRIED && seen & 1 << ERROR;
        fault = fault_of(at, apart, seen, must);
        if (LEVEL == HD_CHECK_FAST && seen & 1 << CARRIED && apart != 1)
            apart = seen & 1 << ERROR ? 1 : seen & 1 << RAISED ? 2 : apart;
        if (fault) {
            say_wrong(at, fault);
            return;
        }
    }
}

#endif
