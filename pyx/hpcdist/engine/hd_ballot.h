/* What the first round of an entry check between nodes combines: the votes, and beside them a
 * *letter*, the data of a short call. See hd_check_mpi.c. */
#ifndef HD_BALLOT_H
#define HD_BALLOT_H

#include <stddef.h>
#include <stdint.h>

/* What the first round compares, and LATE: who was last in the check before. VOTE is their number.
 */
enum { HASH, NOT_HASH, COUNT, NOT_COUNT, UNEVEN, POLLS, REFUSES, LATE, VOTE };

/* Bytes of data in a letter, at most; a multiple of 8. Only what is in use is sent and copied. It
 * may not depend on what the ranks called before: a sum would get other bits. With all that MPI and
 * the check put before it, a ballot stays below the 4 KiB up to which Open MPI sends at once
 * between processes of a machine: a longer one would need the help of a rank that may have left. */
#define HD_LETTER 3840

/* Bytes with which they are sent and copied: whole words. */
#define HD_LETTER_WORDS(bytes) (((size_t)(bytes) + 7) & ~(size_t)7)

/* How the letters of the ranks become one. HD_NO_LETTER: some rank has no data, or they disagree.
 * HD_JOINED_LETTER: each rank fills a part of its own, and the rest is zero. */
enum hd_letter_kind { HD_NO_LETTER = 0, HD_JOINED_LETTER, HD_REDUCED_LETTER };

typedef struct hd_letter {
    uint8_t kind, dtype, redop, unused;
    uint32_t bytes;
    char data[HD_LETTER];
} hd_letter;

/* What a rank contributes to the first round; then, what all do. */
typedef struct hd_first {
    uint64_t vote[VOTE];
    hd_letter letter;
} hd_first;

/* Bytes in use, from the start; a multiple of 8. */
size_t hd_ballot_bytes(const hd_first *f);
void hd_ballot_copy(hd_first *to, const hd_first *from);
/* Letters of different calls become none. */
void hd_ballot_combine(const hd_first *in, hd_first *inout);

#endif
