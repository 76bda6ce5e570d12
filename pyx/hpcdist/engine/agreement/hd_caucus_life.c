/* A group's caucus, from the meeting of each node's ranks to the group's end. */
#include <stdlib.h>
#include <sys/mman.h>

#include "hd_ballot.h"
#include "hd_caucus.h"
#include "hd_caucus_life.h"
#include "hd_comm.h"
#include "hd_split.h"

/* Tells where all ranks are. The nodes are numbered by their first members, as their speakers. */
static int survey(const hd_comm *c, hd_caucus *k)
{
    const int rc = MPI_Allgather(&c->split->first, 1, MPI_INT, k->node_of, 1, MPI_INT, c->mpi);
    for (int r = 0; r < c->size && !rc; r++) {
        const int first = k->node_of[r];
        if (first == r)
            k->stretch[k->nodes++].first = r;
        k->node_of[r] = first == r ? k->nodes - 1 : k->node_of[first];
        k->stretch[k->node_of[r]].last = r;
    }
    return rc;
}

static hd_caucus *caucus_of(const hd_comm *c)
{
    const hd_split *s = c->split;
    hd_caucus *k = malloc(sizeof *k);
    if (!k)
        return k;
    *k = (hd_caucus){.place = s->place,
                     .ranks = s->ranks,
                     .speakers = s->place ? MPI_COMM_NULL : s->rail,
                     .node_of = malloc((size_t)c->size * sizeof *k->node_of),
                     .stretch = malloc((size_t)c->size * sizeof *k->stretch)};
    if (k->node_of && k->stretch)
        return k;
    hd_caucus_free(k);
    return NULL;
}

int hd_caucus_open(hd_comm *c, hd_caucus **out)
{
    const int most = c->split->most, ranks = c->split->ranks;
    size_t room = hd_caucus_room(most), bytes = hd_caucus_bytes(ranks, room);
    hd_caucus *k = caucus_of(c);
    void *at;
    int rc = hd_split_share(c, k != NULL, bytes, &at);
    if (!rc && !at && room > HD_SHORT_LETTER) { /* on all ranks, whose room is the same */
        room = HD_SHORT_LETTER;
        bytes = hd_caucus_bytes(ranks, room);
        rc = hd_split_share(c, k != NULL, bytes, &at);
    }
    *out = at ? k : NULL;
    if (!at) {
        if (k)
            hd_caucus_free(k);
        return rc;
    }
    k->room = room;
    k->at = at;
    k->bytes = bytes;
    return rc ? rc : survey(c, k);
}

void hd_caucus_close(hd_caucus *k)
{
    if (k->at)
        munmap(k->at, k->bytes);
    k->at = NULL;
}

void hd_caucus_free(hd_caucus *k)
{
    hd_caucus_close(k);
    free(k->node_of);
    free(k->stretch);
    free(k);
}
