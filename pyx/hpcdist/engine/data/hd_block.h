/* Blocks: node memory for tensors, which all ranks of a group on one node map. See hd_block.c. */
#ifndef HD_BLOCK_H
#define HD_BLOCK_H

#include <stdint.h>

#include "hd_job.h"
#include "hd_node.h"

typedef struct hd_block hd_block;

/* Collective: a part of j->count bytes for each rank, into *j->new_block; NULL where there is no
 * such memory, on all ranks. */
int hd_block_take(hd_comm *c, hd_job *j);
char *hd_block_part(const hd_block *b, int rank);
/* The tensor is gone. The block is used again, or freed, once those of all ranks are. */
void hd_block_return(hd_block *b);
void hd_blocks_close(hd_comm *c); /* tensors keep their memory */

/* By a thread that does not run an operation. */
int hd_block_holds(hd_comm *c, const char *at, int64_t bytes, hd_spot *out);

/* Whether these bytes lie in this rank's part of a block that others map as well. */
int hd_block_find(const hd_comm *c, const char *at, int64_t bytes, hd_spot *out);
/* A place in another rank's part. */
char *hd_block_at(const hd_comm *c, int rank, hd_spot place);
/* For windows: a block that is kept until hd_block_unref(), or NULL; whether a rank still maps its
 * part; n elements combined into a place in its part, one rank at a time, or, without a block, into
 * memory of this rank. */
hd_block *hd_block_ref(hd_comm *c, uint64_t id);
void hd_block_unref(hd_block *b);
int hd_block_whole(const hd_block *b, int rank);
int hd_block_accumulate(hd_comm *c, hd_job *j, hd_block *b, int rank, const char *from, char *to,
                        int64_t n);
/* Combines n elements into memory of this rank, which may lie in a block of any group. 0: not yet,
 * because another rank does so there. */
int hd_block_combine(int redop, int dtype, const char *from, char *to, int64_t n);

/* From now on this rank's part is its own, with a copy of what it contains. */
void hd_block_detach(hd_comm *c, hd_spot place);

#endif
