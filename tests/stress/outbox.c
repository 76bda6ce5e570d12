/* Notes to several ranks, of which some sends fail, as after a death: what the others read stays
 * until they have it. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "harness.h"
#include "hd_outbox.h"

enum { RANKS = 5, NOTES = 6, BYTES = 24 };

struct stub_request {
    const char *text;
    char was[BYTES];
    int left, fails; /* tests before it ends, and how */
};

static struct stub_request sends[RANKS * NOTES];
static int begun, wrong;
static chance luck;

int MPI_Isend(const void *data, int n, MPI_Datatype type, int to, int tag, MPI_Comm comm,
              MPI_Request *req)
{
    struct stub_request *s = &sends[begun++];
    (void)type, (void)to, (void)tag, (void)comm;
    s->text = data;
    memcpy(s->was, data, (size_t)n);
    s->left = (int)draw(&luck, 8);
    s->fails = !draw(&luck, 4);
    *req = s;
    return MPI_SUCCESS;
}

int MPI_Test(MPI_Request *req, int *done, MPI_Status *st)
{
    struct stub_request *s = *req;
    (void)st;
    if ((*done = !s || !s->left--)) {
        *req = MPI_REQUEST_NULL;
        wrong += s && memcmp(s->text, s->was, BYTES) != 0; /* its text has been freed */
        return s && s->fails ? MPI_ERR_OTHER : MPI_SUCCESS;
    }
    return MPI_SUCCESS;
}

/* Reports a failure as MPI may: before the others have ended, and without touching them. */
int MPI_Testall(int n, MPI_Request *req, int *flag, MPI_Status *st)
{
    (void)st;
    *flag = 1;
    for (int i = 0; i < n; i++) {
        if (req[i] && req[i]->fails && !req[i]->left)
            return MPI_ERR_OTHER;
        *flag &= !req[i] || !req[i]->left;
        if (req[i] && req[i]->left)
            req[i]->left--;
    }
    for (int i = 0; i < n && *flag; i++) {
        wrong += req[i] && memcmp(req[i]->text, req[i]->was, BYTES) != 0;
        req[i] = MPI_REQUEST_NULL;
    }
    return MPI_SUCCESS;
}

static void one_box(void)
{
    const int to[RANKS] = {0, 1, 2, 3, 4};
    hd_outbox box = {0};
    int failed = 0, rc, unsent;
    begun = 0;
    for (int k = 0; k < NOTES; k++) {
        char note[BYTES];
        memset(note, 'a' + k, sizeof note);
        if (hd_outbox_send(&box, MPI_COMM_WORLD, note, sizeof note, HD_OUTBOX_WHOLE, to, RANKS, 1,
                           &rc) != RANKS ||
            rc)
            wrong++;
    }
    for (int k = 0; k < 1000 && hd_outbox_unsent(&box); k++)
        ;
    unsent = hd_outbox_unsent(&box);
    for (int i = 0; i < begun; i++) {
        failed += sends[i].fails;
        if (sends[i].left > 0)
            unsent++; /* nobody asks for it any more */
    }
    wrong += unsent + (hd_outbox_tidy(&box) != !failed);
}

int main(int argc, char **argv)
{
    const int boxes = argc > 2 ? atoi(argv[2]) : 1000;
    luck = chance_of(argc > 1 ? strtoull(argv[1], NULL, 10) : 1, 0);
    for (int i = 0; i < boxes && !wrong; i++)
        one_box();
    printf("%d boxes, %d wrong\n", boxes, wrong);
    return wrong != 0;
}
