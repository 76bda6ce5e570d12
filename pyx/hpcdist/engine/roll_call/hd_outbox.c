/* Messages that no thread waits for: see hd_outbox.h. */
#include <stdlib.h>
#include <string.h>

#include "hd_outbox.h"

/* Messages that are asked for in one call. More would take long where a rank has given up thousands
 * of times, and where one does not go, the later ones to that rank do not either. */
#define ASKED 4

struct hd_parcel {
    struct hd_parcel *next;
    void *text;
    int failed; /* one of its sends has: MPI may read the text for ever */
    int n;
    MPI_Request req[];
};

int hd_outbox_send(hd_outbox *box, MPI_Comm comm, const void *text, size_t bytes, size_t most,
                   const int *to, int n, int tag, int *rc)
{
    const size_t parts = (bytes + most - 1) / most;
    struct hd_parcel *p = malloc(sizeof *p + (size_t)n * parts * sizeof(MPI_Request));
    char *copy = malloc(bytes);

    *rc = MPI_ERR_NO_MEM;
    if (!p || !copy) {
        free(p);
        free(copy);
        return 0;
    }
    memcpy(copy, text, bytes);
    *rc = MPI_SUCCESS;
    p->text = copy;
    p->failed = p->n = 0;
    for (int i = 0; i < n && !*rc; i++)
        for (size_t at = 0; at < bytes && !*rc; at += most) {
            const size_t part = bytes - at < most ? bytes - at : most;
            *rc = MPI_Isend(copy + at, (int)part, MPI_BYTE, to[i], tag, comm, &p->req[p->n]);
            p->n += !*rc;
        }
    n = p->n;
    p->next = NULL;
    if (box->first)
        box->last->next = p;
    else
        box->first = p;
    box->last = p;
    hd_outbox_tidy(box);
    return n;
}

/* Each send by itself: that to a rank which has died fails, and the others go on. */
static int all_ended(struct hd_parcel *p)
{
    int left = 0;
    for (int i = 0; i < p->n; i++) {
        int gone = 0;
        if (MPI_Test(&p->req[i], &gone, MPI_STATUS_IGNORE))
            p->failed = 1;
        else if (!gone)
            p->req[left++] = p->req[i];
    }
    p->n = left;
    return !left;
}

int hd_outbox_tidy(hd_outbox *box)
{
    struct hd_parcel *before = NULL;
    int unsent = 0;
    for (struct hd_parcel *p = box->first, *next; p && unsent < ASKED; p = next) {
        int gone = 0;
        next = p->next;
        if (MPI_Testall(p->n, p->req, &gone, MPI_STATUSES_IGNORE)) {
            p->failed = 1;
            gone = all_ended(p);
        }
        if (!gone) {
            before = p;
            unsent++;
            continue;
        }
        *(before ? &before->next : &box->first) = next;
        if (box->last == p)
            box->last = before;
        box->failed += p->failed;
        if (p->failed)
            continue; /* MPI may still read it */
        free(p->text);
        free(p);
    }
    return !box->first && !box->failed;
}

int hd_outbox_unsent(hd_outbox *box)
{
    (void)hd_outbox_tidy(box);
    return box->first != NULL;
}
