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

int hd_outbox_send(hd_outbox *box, MPI_Comm comm, const void *text, size_t bytes, const int *to,
                   int n, int tag, int *rc)
{
    struct hd_parcel *p = malloc(sizeof *p + (size_t)n * sizeof(MPI_Request));
    void *copy = malloc(bytes);

    *rc = MPI_ERR_NO_MEM;
    if (!p || !copy) {
        free(p);
        free(copy);
        return 0;
    }
    memcpy(copy, text, bytes);
    *rc = MPI_SUCCESS;
    p->text = copy;
    for (p->n = 0; p->n < n; p->n++)
        if ((*rc = MPI_Isend(copy, (int)bytes, MPI_BYTE, to[p->n], tag, comm, &p->req[p->n])))
            break;
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
