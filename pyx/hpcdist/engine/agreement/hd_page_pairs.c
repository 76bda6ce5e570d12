/* Sizes that may differ from rank to rank, compared through the page. Every rank reads the sizes of
 * all pairs, so all ranks find the same answer without a second agreement. */
#include "hd_page_pairs.h"
#include "hd_comm.h"
#include "hd_job.h"
#include "hd_page.h"

static hd_extent *sends(const hd_comm *c, int rank, int parity)
{
    return hd_payloads(c)[rank].extents[parity];
}

static hd_extent *expects(const hd_comm *c, int rank, int parity)
{
    return sends(c, rank, parity) + HD_PAIR_RANKS;
}

static void list(hd_extent *to, const hd_seg *from, int n)
{
    for (int r = 0; r < n; r++)
        to[r] = (hd_extent){from[r].n, from[r].form};
}

void hd_page_pairs_put(const hd_comm *c, const hd_job *j, int parity)
{
    hd_extent *out = sends(c, c->rank, parity), *in = expects(c, c->rank, parity);
    if (c->size > HD_PAIR_RANKS)
        return;
    if (j->kind == HD_GATHER)
        list(out + j->root, j->in, 1);
    else
        list(out, j->in, j->nin);
    if (j->kind == HD_SCATTER)
        list(in + j->root, j->out, 1);
    else
        list(in, j->out, j->nout);
}

static int match(const hd_comm *c, int parity, int from, int to)
{
    const hd_extent *a = sends(c, from, parity) + to, *b = expects(c, to, parity) + from;
    return a->n == b->n && (a->form == b->form || !a->form || !b->form);
}

int hd_page_pairs_match(const hd_comm *c, hd_job *j, int parity)
{
    int64_t longest = 0, total = 0;
    if (c->size > HD_PAIR_RANKS)
        return 0;
    for (int r = 0; r < c->size; r++)
        for (int q = 0; q < c->size; q++) {
            const int64_t n = sends(c, r, parity)[q].n;
            if ((j->kind == HD_SCATTER && r != j->root) || (j->kind == HD_GATHER && q != j->root))
                continue;
            if (!match(c, parity, r, q))
                return 0;
            longest = n > longest ? n : longest;
            total += n;
        }
    j->checked.longest = longest;
    j->checked.total = total;
    return 1;
}

int64_t hd_page_pairs_before(const hd_comm *c, int parity, int of, int rank)
{
    const hd_extent *list = sends(c, of, parity);
    int64_t sum = 0;
    for (int r = 0; r < rank; r++)
        sum += list[r].n;
    return sum;
}
