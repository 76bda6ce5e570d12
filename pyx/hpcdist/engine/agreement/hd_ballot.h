/* What the first round of an entry check between nodes combines: the votes, and beside them a
 * *letter*, the data of a short call. See hd_check_mpi.c. */
#ifndef HD_BALLOT_H
#define HD_BALLOT_H

#include <stddef.h>
#include <stdint.h>

/* What the first round compares; LATE: who was last in the check before; WHO: 1 + a rank that has
 * not gone on from that one; WENT, STAYED: bits of the checks before, the last one first, from
 * which a rank has gone on, and from which it has not. VOTE is their number. */
enum { HASH, NOT_HASH, COUNT, NOT_COUNT, UNEVEN, POLLS, REFUSES, LATE, WHO, WENT, STAYED, VOTE };

/* Bytes of data in a letter, at most; a multiple of 8. Only what is in use is sent and copied. How
 * long a call's letter may be depends on the call and the group (hd_carry.c), never on what the
 * ranks called before: a sum would get other bits. */
#define HD_LETTER (64 << 10)
/* Bytes that every call's letter may have: those of a ballot that is one message. */
#define HD_SHORT_LETTER 3840

/* Bytes with which they are sent and copied: whole words. */
#define HD_LETTER_WORDS(bytes) (((size_t)(bytes) + 7) & ~(size_t)7)

/* How the letters of the ranks become one. HD_NO_LETTER: some rank has no data, or they disagree.
 * HD_JOINED_LETTER: each rank brings a part of its own, or none. */
enum hd_letter_kind { HD_NO_LETTER = 0, HD_JOINED_LETTER, HD_REDUCED_LETTER };

/* A part of a letter, in bytes from its beginning: whole words, or nothing. */
typedef struct hd_span {
    uint32_t from, till;
} hd_span;

typedef struct hd_letter {
    uint8_t kind, dtype, redop, unused;
    uint32_t bytes; /* of the letter of all ranks */
    /* The part of it that this one has, in whole words; the data begins with that part. */
    uint32_t from, till;
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
/* The same, but of the letter no more than that part. */
void hd_ballot_copy_part(hd_first *to, const hd_first *from, hd_span part);
void hd_ballot_no_letter(hd_first *f);
/* Letters of different calls become none. Reduced ones become the part that both have. */
void hd_ballot_combine(const hd_first *in, hd_first *inout);

#endif
