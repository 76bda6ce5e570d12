/* How a message travels.
 *
 * Open MPI 5.0.11 writes past the end of a receive that is shorter than its message when the
 * message is long enough for its rendezvous (mpi4py alone crashes that way with 8 KB sent and 40
 * bytes expected). So with Open MPI a long message goes in two parts: a short envelope, with the
 * tag of the message, that contains the length and the number of the rest; then the rest, which
 * the receiver requests at its true length. Short messages are sent whole, into a buffer that has
 * room for the longest of them. MPICH reports the truncation to its receives.
 *
 * The length of what arrives tells an envelope from a tensor: anything with the length of an
 * envelope is one, because a tensor of that length also goes in two parts. So nothing in a tensor
 * is ever read as if hpcdist had written it. */
#include <limits.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "hd_comm.h"
#include "hd_data.h"
#include "hd_envelope.h"
#include "hd_job.h"
#include "hd_types.h"

static MPI_Datatype type_of(hd_job *j, int64_t bytes, int *n)
{
    if (bytes <= INT_MAX) {
        *n = (int)bytes;
        return MPI_BYTE;
    }
    *n = 1;
    return j->message.big = hd_big_type(bytes);
}

static int64_t bytes_of(const hd_job *j) { return j->count * (int64_t)hd_itemsize(j->dtype); }

#ifdef HD_MAYBE_OPEN_MPI

#define SHORT 2048 /* bytes: far below every eager limit */

/* Bytes: few tensors have this length, and none of a dtype of more than one byte. */
#define ENVELOPE 13

/* The first ENVELOPE bytes travel. A receive has room for any short message. */
struct hd_envelope {
    int64_t bytes;
    uint32_t number;
    char rest[SHORT - 12];
};

_Static_assert(SHORT < HD_DEVICE_LEAST, "what comes whole fits no tensor in device memory");
_Static_assert(offsetof(struct hd_envelope, rest) < ENVELOPE && sizeof(struct hd_envelope) >= SHORT,
               "an envelope holds what it tells, and its buffer a short message");

int hd_message_begin(hd_comm *c, hd_job *j)
{
    const int64_t bytes = bytes_of(j);
    const int tag = hd_tag(j);
    struct hd_envelope *e;
    MPI_Datatype type;
    int n, rc;

    if (j->kind == HD_SEND && bytes <= SHORT && bytes != ENVELOPE)
        return MPI_Isend(j->in->ptr, (int)bytes, MPI_BYTE, j->message.peer, tag, c->mpi,
                         &j->message.req);
    if (!j->room && !(j->room = malloc(sizeof *j->room)))
        return MPI_ERR_NO_MEM;
    e = j->message.envelope = j->room;
    if (j->kind == HD_RECV)
        return MPI_Irecv(e, SHORT, MPI_BYTE, j->message.peer < 0 ? MPI_ANY_SOURCE : j->message.peer,
                         tag, c->mpi, &j->message.req);
    e->bytes = bytes;
    e->number = __atomic_fetch_add(&c->mailed, 1, __ATOMIC_RELAXED) % (uint32_t)(c->tag_limit + 1);
    e->rest[0] = 0;
    rc = MPI_Isend(e, ENVELOPE, MPI_BYTE, j->message.peer, tag, c->mpi, &j->message.envelope_req);
    type = type_of(j, bytes, &n);
    return rc ? rc
              : MPI_Isend(j->in->ptr, n, type, j->message.peer, TAG((int)e->number, TAG_LONG),
                          c->mpi, &j->message.req);
}

/* A message arrived: all of it, or an envelope, whose rest is then requested. */
static int open_envelope(hd_job *j, int *done, MPI_Status *st)
{
    struct hd_envelope *e = j->message.envelope;
    const int64_t own = bytes_of(j);
    MPI_Count got = 0;
    MPI_Datatype type;
    char *to = j->out->ptr;
    int n, rc;

    MPI_Get_elements_x(st, MPI_BYTE, &got);
    if (got != ENVELOPE) {
        /* An empty tensor may have no address. No receive of device memory is as short as this
         * message: it does not fit. */
        if (!j->message.on_device && own)
            memcpy(to, e, (size_t)(got < own ? got : own));
        j->message.got = got;
        return MPI_SUCCESS;
    }
    j->message.got = e->bytes;
    if (e->bytes > own && !(to = j->message.overflow = malloc((size_t)e->bytes))) {
        /* there is nowhere to put it: the sender will time out */
        __atomic_add_fetch(&j->comm->unread, 1, __ATOMIC_RELAXED);
        return MPI_SUCCESS;
    }
    type = type_of(j, e->bytes, &n);
    rc = MPI_Irecv(to, n, type, st->MPI_SOURCE, TAG((int)e->number, TAG_LONG), j->comm->mpi,
                   &j->message.req);
    j->message.envelope = NULL;
    *done = 0;
    return rc ? rc : MPI_Test(&j->message.req, done, st);
}

int hd_message_arrived(hd_job *j, int *done, MPI_Status *st)
{
    return j->message.envelope ? open_envelope(j, done, st) : MPI_SUCCESS;
}

int hd_message_test(hd_job *j, int *done, MPI_Status *st)
{
    int rc = MPI_Test(&j->message.req, done, st), sent = 1;
    if (rc || !*done)
        return rc;
    if (j->kind == HD_RECV)
        return hd_message_arrived(j, done, st);
    if (j->message.envelope)
        rc = MPI_Test(&j->message.envelope_req, &sent, MPI_STATUS_IGNORE);
    *done = sent;
    return rc;
}

int hd_message_matched(const hd_job *j)
{
    return j->kind == HD_RECV && !j->message.envelope && j->message.req != MPI_REQUEST_NULL;
}

int hd_message_in_two(const hd_job *j) { return j->kind == HD_RECV && bytes_of(j) > SHORT; }

#else

int hd_message_begin(hd_comm *c, hd_job *j)
{
    const int tag = hd_tag(j);
    int n;
    const MPI_Datatype type = type_of(j, bytes_of(j), &n);
    static char spare; /* not in the job: MPI may write there after a receive was given up */
    void *to;
    if (j->kind == HD_SEND)
        return MPI_Isend(j->in->ptr, n, type, j->message.peer, tag, c->mpi, &j->message.req);
    /* Intel MPI 2021.18 reports no truncation to a receive of no bytes: it gets room for one. */
    to = n ? j->out->ptr : &spare;
    return MPI_Irecv(to, n ? n : 1, type, j->message.peer < 0 ? MPI_ANY_SOURCE : j->message.peer,
                     tag, c->mpi, &j->message.req);
}

int hd_message_arrived(hd_job *j, int *done, MPI_Status *st)
{
    MPI_Count got = 0;
    (void)done;
    MPI_Get_elements_x(st, MPI_BYTE, &got);
    j->message.got = got;
    return MPI_SUCCESS;
}

int hd_message_test(hd_job *j, int *done, MPI_Status *st)
{
    const int rc = MPI_Test(&j->message.req, done, st);
    return !rc && *done && j->kind == HD_RECV ? hd_message_arrived(j, done, st) : rc;
}

int hd_message_matched(const hd_job *j)
{
    (void)j;
    return 0;
}

int hd_message_in_two(const hd_job *j)
{
    (void)j;
    return 0;
}

#endif

void hd_message_free(hd_job *j)
{
    if (j->message.big != MPI_DATATYPE_NULL)
        MPI_Type_free(&j->message.big);
    if (hd_p2p_unfinished(j)) /* it ended with an error, and MPI may still touch them */
        j->room = NULL;
    else
        free(j->message.overflow);
    j->message.envelope = NULL;
    j->message.overflow = NULL;
}

int hd_p2p_unfinished(const hd_job *j)
{
    return j->message.req != MPI_REQUEST_NULL || j->message.envelope_req != MPI_REQUEST_NULL;
}
