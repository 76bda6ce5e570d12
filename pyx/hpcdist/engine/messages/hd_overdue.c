/* What is said of a message whose time is over, and of the ranks that it waited for. */
#include "hd_overdue.h"
#include "hd_base.h"
#include "hd_comm.h"
#include "hd_hang.h"
#include "hd_job.h"
#include "hd_peer.h"
#include "hd_status.h"
#include "hd_types.h"

static int of_window(const hd_job *j)
{
    return j->message.tag_kind >= HD_WINDOW_REQUEST && j->message.tag_kind <= HD_WINDOW_ANSWER;
}

static const char *missing(const hd_job *j, int over)
{
    if (j->kind == HD_RECV && !over)
        return "its message has begun to come, and MPI may write to the tensor at any later time: "
               "do not use it";
    if (of_window(j))
        return "it has not answered";
    return j->kind == HD_SEND ? "no receive has taken it" : "no matching send was posted";
}

void hd_say_overdue(char *text, const hd_job *j, double waited, int over)
{
    const hd_comm *c = j->comm;
    hd_text t;
    hd_text_init(&t, text, HD_TEXT);
    hd_say(&t, "timeout after %.3g s in %s(", waited, j->api);
    if (!of_window(j))
        hd_say(&t, "%s, %lld elements", hd_dtype_name(j->dtype), (long long)j->count);
    hd_say(&t, ") ");
    if (j->message.peer < 0)
        hd_say(&t, "from any rank");
    else
        hd_say(&t, "%s rank %d", hd_peer_is(j), j->message.peer);
    hd_say(&t, ", tag %d, group '%s' (this is rank %d of %d", j->message.tag, c->name, c->rank,
           c->size);
    if (j->site[0])
        hd_say(&t, ", called at %s", j->site);
    hd_say(&t, "): %s.", missing(j, over));
    for (int r = 0; r < c->size && t.used < 1200; r++)
        if (r != c->rank && (j->message.peer < 0 || j->message.peer == r)) {
            hd_say(&t, "\n  rank %d ", r);
            hd_session_report(c->session, c->node_slot[r], &t);
            hd_hang_say_where(c->session, c->node_slot[r], &t);
        }
}
