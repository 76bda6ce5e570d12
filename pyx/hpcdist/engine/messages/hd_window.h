/* Windows between nodes: memory of this rank that others of a group write and read by messages. See
 * hd_window.c. */
#ifndef HD_WINDOW_H
#define HD_WINDOW_H

#include <stdint.h>

#include "hd_comm.h"

enum hd_window_call { HD_PUT = 1, HD_GET, HD_ACCUMULATE };

/* How a request ended. NOT_THERE: this rank has withdrawn the memory. */
enum hd_window_outcome {
    HD_SERVED = 0,
    HD_NOT_THERE,
    HD_OUT_OF_RANGE,
    HD_NO_ROOM, /* no memory for the data on their way */
    HD_DATA_LOST
};

/* A message of kind HD_WINDOW_REQUEST. The data of a put or an accumulate follow in it if they are
 * at most HD_WINDOW_SHORT bytes; longer ones are a message of kind HD_WINDOW_BRINGS. */
typedef struct hd_request {
    uint64_t window;   /* the number of its registration */
    uint64_t number;   /* the sender's own */
    int64_t at, bytes; /* in the window */
    int32_t call;
    int32_t dtype, redop; /* of an accumulate */
    int32_t tag;          /* of its data and its answer */
} hd_request;

/* A message of kind HD_WINDOW_ANSWER. The data of a short get follow in it; longer ones are a
 * message of kind HD_WINDOW_FETCHES, which comes if the request was served. The two ranks may ask
 * each other under the same number, so data of puts and of gets are different kinds. */
typedef struct hd_answer {
    uint64_t number; /* of the request */
    int32_t outcome;
    int32_t unused;
} hd_answer;

/* With the request, far below every eager limit, and sent whole: see hd_envelope.c. */
#define HD_WINDOW_SHORT 1024

typedef struct hd_exposed hd_exposed;

/* Lets the others of the group use the memory, under a number higher than those before. NULL: there
 * is no memory for that, or no thread. */
hd_exposed *hd_window_expose(hd_comm *c, uint64_t number, char *at, int64_t bytes);
/* Ends that. 1: MPI is done with the memory; 0: it may touch it for ever. May be repeated. */
int hd_window_withdraw(hd_exposed *e);
void hd_window_free(hd_exposed *e); /* withdrawn */
void hd_windows_close(hd_comm *c);  /* withdraws all of a group; NULL: of all groups */
int hd_windows_shutdown(void);      /* the thread has left MPI for ever; 1: it has */

#endif
