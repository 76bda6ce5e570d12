/* Whether the other rank of a message can still send or receive it: see hd_peer.h. */
#include "hd_peer.h"
#include "hd_base.h"
#include "hd_comm.h"
#include "hd_job.h"
#include "hd_page.h"
#include "hd_report.h"
#include "hd_status.h"

#define ON_ITS_WAY                                                                                 \
    0.5 /* seconds that a message has to arrive that was sent before its sender left */

int hd_peer_gone(hd_job *j)
{
    hd_comm *c = j->comm;
    char way[HD_DESC];
    hd_text t;
    enum hd_gone how;
    int all = 1;
    if (j->message.peer >= 0) {
        how = hd_session_gone(c->session, c->node_slot[j->message.peer]);
        if (!how)
            return 0;
        hd_text_init(&t, way, sizeof way);
        hd_say_gone(&t, c, j->message.peer, how);
        hd_fail(j, HD_ERR_FAILED,
                "rank %d of group '%s' %s: %s %s it cannot complete (this is rank %d, tag %d%s%s)",
                j->message.peer, c->name, way, j->api, j->kind == HD_SEND ? "to" : "from", c->rank,
                j->message.tag, j->site[0] ? ", called at " : "", j->site);
        return 1;
    }
    for (int r = 0; r < c->size; r++)
        all &= r == c->rank || hd_session_gone(c->session, c->node_slot[r]) != HD_HERE;
    if (all)
        hd_fail(j, HD_ERR_FAILED,
                "all other ranks of group '%s' have failed or left the job: %s cannot complete",
                c->name, j->api);
    return all;
}

/* Whether the peer, or each rank that could be it, has left the group. Where this rank is leaving
 * it, too, its messages end with that. */
static int has_closed(const hd_comm *c, int peer)
{
    if (!c->page || peer == c->rank || __atomic_load_n(&c->closing, __ATOMIC_ACQUIRE))
        return 0;
    for (int r = 0; r < c->size; r++)
        if (r != c->rank && (peer < 0 || peer == r) && !hd_page_closed(c, r))
            return 0;
    return 1;
}

int hd_peer_closed(hd_job *j)
{
    const hd_comm *c = j->comm;
    const int peer = j->message.peer;
    char who[48];
    hd_text t;
    if (!has_closed(c, peer))
        return 0;
    if (!j->message.left)
        j->message.left = hd_now();
    if ((double)(hd_now() - j->message.left) * 1e-9 < ON_ITS_WAY)
        return 0;
    hd_text_init(&t, who, sizeof who);
    if (peer >= 0)
        hd_say(&t, "rank %d", peer);
    else
        hd_say(&t, "all other ranks");
    hd_fail(j, HD_ERR_MISMATCH,
            "%s of group '%s' ha%s destroyed it: %s %s it cannot complete (this is rank %d, tag "
            "%d%s%s)",
            who, c->name, peer < 0 ? "ve" : "s", j->api, j->kind == HD_SEND ? "to" : "from",
            c->rank, j->message.tag, j->site[0] ? ", called at " : "", j->site);
    return 1;
}
