/* Agreements of the ranks that live: see hd_accord.h. */
#include "hd_accord.h"
#include "hd_base.h"
#include "hd_ulfm.h"

/* Bits that every rank gives. An address of a message has none of them: malloc aligns it. */
#define MARK 7
#define MARK_BITS 3

static int marked(int value) { return value << MARK_BITS | MARK; }
static int is_whole(int word) { return (word & MARK) == MARK; }
static int value_in(int word) { return (word >> MARK_BITS) & ((1 << HD_ACCORD_BITS) - 1); }

void hd_accord_begin(hd_accord *a, int given, int parting)
{
    *a = (hd_accord){.begun = 1,
                     .given = given,
                     .parting = parting,
                     .word = marked(given),
                     .request = MPI_REQUEST_NULL};
}

/* A rank that cannot hear whether all have heard goes by what it has heard itself: two words of one
 * accord would have to be lost for it to be wrong. */
int hd_accord_heard(hd_accord *a)
{
    const int whole = is_whole(a->word), value = value_in(a->word);
    int over;
    a->going = 0;
    if (a->sure) {
        over = whole ? value : a->known;
        a->word = marked(a->given);
    } else {
        over = a->parting && !value;
        a->known = whole;
        a->value = value;
        a->word = marked(whole);
    }
    a->sure = !a->sure;
    a->begun = !over;
    return over;
}

int hd_accord_reach(MPI_Comm comm, int *value)
{
    hd_accord a;
    int rc;
    hd_accord_begin(&a, *value, 0);
    do {
        if (hd_accord_say(&a, comm))
            return HD_ERR_BACKEND;
        rc = MPI_Wait(&a.request, MPI_STATUS_IGNORE);
        if (rc && !hd_accord_has_word(rc))
            return HD_ERR_BACKEND;
    } while (!hd_accord_heard(&a));
    *value = a.value;
    return HD_OK;
}

#ifdef HD_HAS_ULFM

int hd_accord_say(hd_accord *a, MPI_Comm comm)
{
    int n = 0;
    if (a->going)
        return HD_OK;
    MPI_Comm_size(comm, &n);
    MPIX_Comm_ack_failed(comm, n, &n); /* else it would report them again */
    if (MPIX_Comm_iagree(comm, &a->word, &a->request))
        return HD_ERR_BACKEND;
    a->going = 1;
    return HD_OK;
}

int hd_accord_has_word(int error)
{
    int class = error;
    MPI_Error_class(error, &class);
    return class == MPIX_ERR_PROC_FAILED;
}

#else

int hd_accord_say(hd_accord *a, MPI_Comm comm)
{
    (void)a, (void)comm;
    return HD_ERR_BACKEND;
}

int hd_accord_has_word(int error)
{
    (void)error;
    return 0;
}

#endif
