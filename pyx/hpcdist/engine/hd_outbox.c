/* Messages that no thread waits for: see hd_outbox.h. */
#include <stdlib.h>
#include <string.h>

#include "hd_outbox.h"

struct hd_parcel {
    struct hd_parcel *next;
    void *text;
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
    p->n = 0;
    for (int i = 0; i < n && !*rc; i++)
        for (size_t at = 0; at < bytes && !*rc; at += most) {
            const size_t part = bytes - at < most ? bytes - at : most;
            *rc = MPI_Isend(copy + at, (int)part, MPI_BYTE, to[i], tag, comm, &p->req[p->n]);
            p->n += !*rc;
        }
    n = p->n;
    p->next = box->first;
    box->first = p;
    hd_outbox_tidy(box);
    return n;
}

int hd_outbox_tidy(hd_outbox *box)
{
    for (struct hd_parcel **p = &box->first; *p;) {
        struct hd_parcel *x = *p;
        int gone = 0;
        /* After an error the message is kept for ever. */
        if (!MPI_Testall(x->n, x->req, &gone, MPI_STATUSES_IGNORE) && gone) {
            *p = x->next;
            free(x->text);
            free(x);
        } else {
            p = &x->next;
        }
    }
    return !box->first;
}
