/* Which ranks are in a check of a group that spans nodes: see hd_here.h. */
#include <stdlib.h>
#include <string.h>

#include "hd_base.h"
#include "hd_here.h"
#include "hd_outbox.h"

#define TAG_HERE 2
#define AT_ONCE 2 /* messages of a large group's rank every 50 ms */

static size_t bytes_of(const hd_here *h)
{
    return sizeof(hd_list) + (size_t)h->words * sizeof(uint64_t);
}

int hd_here_open(hd_here *h, int ranks)
{
    h->words = (ranks + 63) / 64;
    h->known = calloc(1, bytes_of(h));
    h->heard = calloc(1, bytes_of(h));
    return h->known && h->heard ? HD_OK : HD_ERR_MEMORY;
}

void hd_here_close(hd_here *h)
{
    free(h->known);
    free(h->heard);
}

/* Takes in what another rank, or this one, knows. */
static void merge(hd_here *h, const hd_list *list)
{
    int news = 0;
    if (list->check < h->known->check)
        return;
    if (list->check > h->known->check) {
        memset(h->known, 0, bytes_of(h));
        h->known->check = list->check;
    }
    for (int i = 0; i < h->words; i++) {
        news |= (list->bits[i] & ~h->known->bits[i]) != 0;
        h->known->bits[i] |= list->bits[i];
    }
    if (news && h->in_turn)
        h->until = h->told + h->n_to;
}

void hd_here_announce(hd_here *h, uint64_t now, int rank)
{
    memset(h->heard, 0, bytes_of(h));
    h->heard->check = now;
    h->heard->bits[rank / 64] |= 1ull << rank % 64;
    merge(h, h->heard);
    h->announced = 1;
    h->until = h->told + h->n_to;
}

int hd_here_tell(hd_here *h, uint64_t now)
{
    int begun = 0, rc = 0;
    if (!h->announced || h->known->check != now)
        return 0;
    for (int i = 0; h->told < h->until && (i < AT_ONCE || !h->in_turn); i++, h->told++)
        begun += hd_outbox_send(&h->sent, h->mpi, h->known, bytes_of(h), HD_OUTBOX_WHOLE,
                                &h->to[h->told % h->n_to], 1, TAG_HERE, &rc);
    return begun;
}

int hd_here_read(hd_here *h)
{
    MPI_Message message;
    MPI_Status st;
    int there = 0;
    if (MPI_Improbe(MPI_ANY_SOURCE, TAG_HERE, h->mpi, &there, &message, &st) || !there ||
        MPI_Mrecv(h->heard, (int)bytes_of(h), MPI_BYTE, &message, MPI_STATUS_IGNORE))
        return 0;
    merge(h, h->heard);
    return 1;
}

int hd_here_has(const hd_here *h, uint64_t now, int rank)
{
    return h->known->check == now && (h->known->bits[rank / 64] >> rank % 64 & 1);
}

int hd_here_any(const hd_here *h, uint64_t now)
{
    uint64_t any = 0;
    for (int i = 0; i < h->words; i++)
        any |= h->known->bits[i];
    return any && h->known->check == now;
}

int hd_here_later(const hd_here *h, uint64_t now) { return h->known->check > now; }
