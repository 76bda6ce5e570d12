/* Sizes that may differ from rank to rank, compared through the page: no MPI call is made. */
#ifndef HD_PAGE_PAIRS_H
#define HD_PAGE_PAIRS_H

#include <stdint.h>

#include "hd_job.h"

/* Publishes, for a check of that parity, what this rank sends to each rank and expects from it. */
void hd_page_pairs_put(const hd_comm *c, const hd_job *j, int parity);
/* Whether each rank sends what its receiver expects; if so, j gets the sizes. All ranks find the
 * same answer. */
int hd_page_pairs_match(const hd_comm *c, hd_job *j, int parity);
/* Elements that rank `of` sends to the ranks before `rank`. */
int64_t hd_page_pairs_before(const hd_comm *c, int parity, int of, int rank);

#endif
