/* The status page: what the ranks of a node know of each other without asking. */
#ifndef HD_STATUS_H
#define HD_STATUS_H

#include <stdint.h>

#include "hd_base.h"
#include "hd_job.h"

void hd_session_enter(hd_session *s, const hd_job *j); /* this rank is in j */
void hd_session_leave(hd_session *s);
void hd_session_begin(hd_session *s);                 /* reports forget the operations so far */
void hd_session_note(hd_session *s, const hd_job *j); /* with the calling line, on slow paths */

/* What has become of a rank. */
enum hd_gone { HD_HERE = 0, HD_LEFT, HD_DIED, HD_FAILED };
enum hd_gone hd_session_gone(hd_session *s, int slot);
/* A rank of the session has died, so that all operations fail: see hd_ft.h. */
int hd_session_broken(const hd_session *s);
/* Inline: this rank cannot leave check n, unless it times out after `left` more seconds. */
void hd_session_blocked(hd_session *s, const hd_comm *c, uint32_t n, double left);
/* The check of another group that the rank in `slot` cannot leave because this rank has not reached
 * it, while this rank cannot leave its own: neither ever will. 0: there is none. *where: that
 * group. */
uint32_t hd_session_crossed(hd_session *s, const hd_comm *c, int slot, const char **where);
#define HD_STARVED 2000000000LL /* ns: a rank that shows no life for longer is reported */
/* ns since the rank in `slot` has shown that it lives; 0: no more than `limit`. */
int64_t hd_session_silent(const hd_session *s, int slot, int64_t limit);
/* ns for which the rank in `slot` has waited for a core in the operation that it is in. */
int64_t hd_session_starved(const hd_session *s, int slot);
void hd_session_report(hd_session *s, int slot,
                       hd_text *t); /* "in recv from rank 2 for 3.1 s at ..." */

void hd_session_set_leaving(hd_session *s);
/* After an unhandled exception: the others see the reason. */
void hd_session_set_failing(hd_session *s, const char *why);

#endif
