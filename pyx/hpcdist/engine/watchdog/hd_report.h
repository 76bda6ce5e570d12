/* What the errors of an operation say: which call, on which ranks, called where. */
#ifndef HD_REPORT_H
#define HD_REPORT_H

#include "hd_base.h"
#include "hd_job.h"
#include "hd_status.h"

void hd_note_site(hd_job *j); /* the calling line, if available */
void hd_say_call(hd_text *t, const hd_comm *c, const hd_job *j);
/* "ranks 1, 2 refused their arguments: why"; also noted in the job, for later use. The ranks'
 * reasons are equal. */
void hd_say_refused(hd_text *t, hd_job *j, int code, const hd_refused *by);
void hd_describe_here(char *out, hd_job *j); /* into HD_DESC bytes */
/* Adds to such a description the ranks that have not arrived. */
void hd_say_awaited(char *here, const hd_comm *c, int (*arrived)(const void *context, int rank),
                    const void *context);
void hd_say_gone(hd_text *t, const hd_comm *c, int rank, enum hd_gone how);
/* Whether the call has moved data, and `rest`: the last sentence of an error. */
void hd_say_outcome(hd_text *t, const hd_job *j, const char *rest);
/* After a call that failed on all ranks: what can be done with the group. */
void hd_say_unharmed(hd_text *t, const hd_comm *c, const hd_job *j);
void hd_describe_call(hd_description *out, hd_job *j); /* and where it is made */
/* A description per rank. */
int hd_fail_mismatch(hd_comm *c, hd_job *j, const hd_description *of);
int hd_fail_gone(hd_comm *c, hd_job *j, int rank, enum hd_gone how);
/* A member has left the group, and the job goes on; `way`: it "has" done what. */
int hd_fail_closed(hd_comm *c, hd_job *j, int rank, const char *way);
/* A rank of the session has died. */
int hd_fail_broken(hd_comm *c, hd_job *j);
/* Another rank has given up: if it did so because one has died, this rank soon sees that, too. */
int hd_fail_if_broken(hd_comm *c, hd_job *j);
/* The first member that has gone without arriving, if any. One that arrived, gave the call up and
 * ended keeps nobody waiting: what it waited for does. */
int hd_fail_if_gone(hd_comm *c, hd_job *j, int (*arrived)(const void *context, int rank),
                    const void *context);

#endif
