/* Which tensors of one call share memory.
 *
 * Outputs that overlap each other have no right answer. An input may lie in an output as long as
 * the data can be moved without a copy that the caller did not ask for; hd_moves.c and
 * hd_reductions.c define those cases. Any other overlap is refused before another rank hears of
 * the call. */
#include <stdlib.h>

#include "hd_alias.h"
#include "hd_job.h"

#define FEW 64 /* segments that are sorted on the stack */

typedef struct span {
    const char *from, *to;
    int index;
} span;

static int by_address(const void *a, const void *b)
{
    const span *one = a, *other = b;
    return one->from < other->from ? -1 : one->from > other->from;
}

/* The segments that are not empty, sorted by address; returns how many. */
static int sorted(const hd_seg *list, int n, int64_t item, span *out)
{
    int k = 0, ascend = 1;
    for (int i = 0; i < n; i++) {
        if (!list[i].n)
            continue;
        out[k] = (span){list[i].ptr, list[i].ptr + list[i].n * item, i};
        ascend &= !k || out[k - 1].from <= out[k].from;
        k++;
    }
    if (!ascend)
        qsort(out, (size_t)k, sizeof *out, by_address);
    return k;
}

static int in_order(const hd_seg *list, int n, int64_t item)
{
    for (int i = 1; i < n; i++)
        if (list[i].ptr < list[i - 1].ptr + list[i - 1].n * item)
            return 0;
    return 1;
}

int hd_overlap(const hd_seg *list, int n, int64_t item, int *one, int *other)
{
    span few[FEW], *spans = few;
    int k, found = 0;

    if (in_order(list, n, item)) /* parts of one tensor, and most lists of tensors */
        return 0;
    if (n > FEW && !(spans = malloc((size_t)n * sizeof *spans)))
        return -1;
    k = sorted(list, n, item, spans);
    for (int i = 1; i < k && !found; i++) {
        found = spans[i].from < spans[i - 1].to;
        *one = spans[i - 1].index;
        *other = spans[i].index;
    }
    if (spans != few)
        free(spans);
    return found;
}

/* The first span that ends after p. */
static int search(const span *spans, int k, const char *p)
{
    int low = 0;
    while (low < k) {
        const int middle = (low + k) / 2;
        if (spans[middle].to <= p)
            low = middle + 1;
        else
            k = middle;
    }
    return low;
}

int hd_input_in_output(const hd_seg *in, int nin, const hd_seg *out, int nout, int64_t item,
                       hd_own own, int *one, int *other)
{
    span few[FEW], *spans = few;
    int k, found = 0;

    if (nout > FEW && !(spans = malloc((size_t)nout * sizeof *spans)))
        return -1;
    k = sorted(out, nout, item, spans);
    for (int i = 0; i < nin && !found; i++) {
        const char *to = in[i].ptr + in[i].n * item;
        if (!in[i].n)
            continue;
        for (int s = search(spans, k, in[i].ptr); s < k && spans[s].from < to && !found; s++) {
            found = spans[s].index != own.first + i * own.step ||
                    (own.exact && spans[s].from != in[i].ptr);
            *one = i;
            *other = spans[s].index;
        }
    }
    if (spans != few)
        free(spans);
    return found;
}
