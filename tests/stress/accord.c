/* Accords of which MPI loses one word, on a rank or on all of them: nobody goes by it, and all end
 * with the same value after as many words. MPI's agreement is the bitwise and of the words here. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

#include "harness.h"
#include "hd_accord.h"

enum { RANKS = 4, WORDS = 8, ALL_RANKS = RANKS, NOBODY };

static chance luck;
static int wrong;

int MPI_Wait(MPI_Request *req, MPI_Status *st)
{
    (void)req, (void)st;
    return MPI_ERR_OTHER;
}

/* The low half of an address that malloc has given. */
static int garbage(void) { return (int)(uint32_t)((draw(&luck, 1u << 28) + 1024) << 3); }

/* One word of all ranks; `loses` hears garbage in its place, or all of them do. 1: over, on all. */
static int say(hd_accord *of, int loses)
{
    const int lost = garbage();
    int word = loses == ALL_RANKS ? lost : -1, over = 0;
    for (int r = 0; r < RANKS; r++)
        word &= of[r].word;
    for (int r = 0; r < RANKS; r++) {
        of[r].word = loses == r ? lost : word;
        over += hd_accord_heard(&of[r]);
    }
    wrong += over && over < RANKS;
    return over;
}

/* parting: as ranks go on or end; each gives all high bits, or they all give 0. */
static void one_accord(int which, int loses, int parting)
{
    const int high = (1 << HD_ACCORD_BITS) - 4, ends = parting && !draw(&luck, 2);
    hd_accord of[RANKS];
    int want = -1, words = 0, over = 0;
    if (ends && loses < RANKS)
        return; /* the others have gone: the one that has not heard waits for their processes' ends
                 */
    for (int r = 0; r < RANKS; r++) {
        const int any = (int)draw(&luck, 1u << HD_ACCORD_BITS);
        const int gives = ends ? 0 : parting ? high | (int)draw(&luck, 4) : any | any >> 3;
        want &= gives;
        hd_accord_begin(&of[r], gives, parting);
    }
    while (!over && words < WORDS) {
        over = say(of, words == which ? loses : NOBODY);
        words++;
    }
    wrong += !over;
    for (int r = 0; r < RANKS; r++)
        wrong += of[r].value != want || of[r].begun || of[r].going;
    wrong += loses == NOBODY && words != (ends ? 1 : 2);
}

int main(int argc, char **argv)
{
    const int rounds = argc > 2 ? atoi(argv[2]) : 1000;
    luck = chance_of(argc > 1 ? strtoull(argv[1], NULL, 10) : 1, 0);
    for (int i = 0; i < rounds && !wrong; i++)
        for (int which = 0; which < 4; which++)
            for (int loses = 0; loses <= NOBODY; loses++)
                for (int parting = 0; parting < 2; parting++)
                    one_accord(which, loses, parting);
    printf("%d rounds, %d wrong\n", rounds, wrong);
    return wrong != 0;
}
