/* HPCDIST_NAN_CHECK: looks for NaNs in what this rank gives to the others. */
#ifndef HD_NAN_H
#define HD_NAN_H

#include <stdint.h>

#include "hd_comm.h"
#include "hd_job.h"

/* Whether this rank looks. Other ranks may decide otherwise. */
extern int hd_nan_wanted;
void hd_nan_wish(int wanted);

/* Where a NaN is. */
typedef struct hd_nan {
    int64_t element, of; /* its index in its tensor, in the order of memory, and how many there are;
                          * of 0: there is none */
    int tensor;          /* its tensor's place in a list; -1: there is no list of several */
} hd_nan;

/* The first NaN of what a collective reads of this rank. Never of device memory. 1: there is one.
 */
int hd_nan_find(const hd_job *j, hd_nan *found);

/* Makes of a collective one that this rank refuses, with its error. The others get the reason in
 * the entry check. */
void hd_nan_refuse(hd_comm *c, hd_job *j, const hd_nan *found);
/* Without the entry check nobody could tell the others: the operation was carried out, and then
 * fails here alone. */
void hd_nan_fail_after(hd_comm *c, hd_job *j, const hd_nan *found);

/* For one tensor that no other rank waits for: 1 if it contains a NaN. The job then fails, with
 * what has become of the tensor. */
int hd_nan_fail_alone(hd_job *j, const char *outcome);

/* A message that was sent or has arrived: the job fails if it contains a NaN. A send is looked at
 * before it begins, while its tensor cannot change. Neither is held up. */
void hd_nan_look_at_send(hd_job *j);
void hd_nan_fail_message(hd_job *j);

#endif
