/* The operations of a group that another library than MPI moves, which is NCCL: they are noted in
 * the flight recorder, and their errors explained, as those of MPI are. The module of that library
 * is built without MPI, so it reaches everything through the pointers in the struct. */
#ifndef HD_BESIDE_H
#define HD_BESIDE_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

typedef struct hd_beside hd_beside;

/* One call; the fields mean what they do in an hd_record. */
typedef struct hd_beside_call {
    uint32_t seq;
    int32_t peer;
    int64_t count, in_n, out_n;
    int8_t kind, dtype, redop;
    uint16_t name;
} hd_beside_call;

struct hd_beside {
    /* With the GIL: a new record's number, 0 for none. */
    uint64_t (*begin)(hd_beside *b, const hd_beside_call *call);
    void (*end)(uint64_t record, int code); /* code: as enum hd_code */
    uint16_t (*name)(const char *api);
    /* Shortly before a timeout: asks the ranks for their stacks. */
    void (*expect)(hd_beside *b, double left);
    /* Adds lines that name the first collective in flight on which the ranks of this node differ:
     * its line, and what the others call in its place. */
    void (*explain)(hd_beside *b, uint64_t record, char *text, size_t room);
    void (*report)(hd_beside *b, const char *why); /* writes the hang report */
    void (*put)(hd_beside *b);
    uint32_t (*site)(void); /* with the GIL: the calling line's number */
    int refs;               /* atomic */
    pthread_mutex_t mu;
    struct hd_comm *comm; /* the same ranks' group over MPI; NULL: it is gone */
    uint64_t uid;
    uint16_t group;
};

/* ranks: the members' ranks in the world. NULL: out of memory. */
hd_beside *hd_beside_new(struct hd_comm *c, const char *name, const int32_t *ranks,
                         uint32_t (*site)(void));
/* The group over MPI is about to be freed. */
void hd_beside_part(hd_beside *b);

#endif
