/* A group's caucus, from the meeting of each node's ranks to the group's end. */
#include <stdlib.h>
#include <sys/mman.h>

#include "hd_ballot.h"
#include "hd_caucus.h"
#include "hd_caucus_life.h"
#include "hd_comm.h"
#include "hd_split.h"

int hd_caucus_open(const hd_comm *c, hd_caucus **out)
{
    const hd_split *s = c->split;
    size_t room = hd_caucus_room(s->most), bytes = hd_caucus_bytes(s->ranks, room);
    hd_caucus *k = malloc(sizeof *k);
    void *at;
    int rc = hd_split_share(c, k != NULL, bytes, &at);
    if (!rc && !at && room > HD_SHORT_LETTER) { /* on all ranks, whose room is the same */
        room = HD_SHORT_LETTER;
        bytes = hd_caucus_bytes(s->ranks, room);
        rc = hd_split_share(c, k != NULL, bytes, &at);
    }
    if (at)
        *k = (hd_caucus){.place = s->place,
                         .ranks = s->ranks,
                         .speakers = s->place ? MPI_COMM_NULL : s->rail,
                         .nodes = c->size / s->rails,
                         .room = room,
                         .at = at,
                         .bytes = bytes};
    else
        free(k);
    *out = at ? k : NULL;
    return rc;
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
    free(k);
}
