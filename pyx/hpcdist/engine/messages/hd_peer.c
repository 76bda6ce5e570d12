/* Whether the other rank of a message can still send or receive it: see hd_peer.h. */
#include "hd_peer.h"
#include "hd_base.h"
#include "hd_comm.h"
#include "hd_job.h"
#include "hd_page.h"
#include "hd_post.h"
#include "hd_report.h"
#include "hd_status.h"

#define NAMED 16 /* ranks that an error lists */
#define ON_ITS_WAY                                                                                 \
    0.5 /* seconds that a message has to arrive that was sent before its sender left */

/* "ranks 0, 2, 3" */
static void say_others(hd_text *t, const hd_comm *c)
{
    int said = 0;
    for (int r = 0; r < c->size && said < NAMED; r++)
        if (r != c->rank)
            hd_say(t, "%s %d", said++ ? "," : c->size > 2 ? "ranks" : "rank", r);
    if (c->size - 1 > NAMED)
        hd_say(t, " and %d more", c->size - 1 - NAMED);
}

const char *hd_peer_is(const hd_job *j)
{
    return j->kind == HD_SEND || j->message.tag_kind == HD_WINDOW_ANSWER ? "to" : "from";
}

int hd_peer_gone(hd_job *j)
{
    hd_comm *c = j->comm;
    char way[HD_DESC];
    hd_text t;
    enum hd_gone how;
    const int peer = j->message.peer < 0 && c->size == 2 ? !c->rank : j->message.peer;
    if (peer >= 0) {
        how = hd_session_gone(c->session, c->node_slot[peer]);
        if (!how)
            return 0;
        hd_text_init(&t, way, sizeof way);
        hd_say_gone(&t, c, peer, how);
        hd_fail(j, HD_ERR_FAILED,
                "rank %d of group '%s' %s: %s %s it cannot complete (this is rank %d, tag %d%s%s)",
                peer, c->name, way, j->api, hd_peer_is(j), c->rank, j->message.tag,
                j->site[0] ? ", called at " : "", j->site);
        return 1;
    }
    for (int r = 0; r < c->size; r++)
        if (c->size == 1 ||
            (r != c->rank && hd_session_gone(c->session, c->node_slot[r]) == HD_HERE))
            return 0;
    hd_text_init(&t, way, sizeof way);
    say_others(&t, c);
    hd_fail(j, HD_ERR_FAILED,
            "all other ranks of group '%s' (%s) have failed or left the job: %s cannot complete "
            "(this is rank %d, tag %d%s%s)",
            c->name, way, j->api, c->rank, j->message.tag, j->site[0] ? ", called at " : "",
            j->site);
    return 1;
}

static enum hd_closed closed_by(const hd_comm *c, int rank)
{
    if (c->page)
        return hd_page_closed(c, rank);
    return c->post && hd_post_closed(c, rank) ? HD_DESTROYED : HD_OPEN;
}

/* Whether and how the peer, or each rank that could be it, has left the group. Where this rank is
 * leaving it, too, its messages end with that. */
static enum hd_closed has_closed(const hd_comm *c, int peer)
{
    enum hd_closed how = HD_OPEN;
    if (peer == c->rank || __atomic_load_n(&c->closing, __ATOMIC_ACQUIRE))
        return HD_OPEN;
    for (int r = 0; r < c->size; r++) {
        if (r == c->rank || (peer >= 0 && peer != r))
            continue;
        const enum hd_closed one = closed_by(c, r);
        if (!one)
            return HD_OPEN;
        if (how != HD_DESTROYED)
            how = one;
    }
    return how;
}

int hd_peer_closed(hd_job *j)
{
    const hd_comm *c = j->comm;
    const int peer = j->message.peer;
    char who[HD_DESC];
    hd_text t;
    const enum hd_closed way = has_closed(c, peer);
    if (!way)
        return 0;
    if (!j->message.left)
        j->message.left = hd_now();
    if ((double)(hd_now() - j->message.left) * 1e-9 < ON_ITS_WAY)
        return 0;
    hd_text_init(&t, who, sizeof who);
    if (peer >= 0)
        hd_say(&t, "rank %d", peer);
    else
        say_others(&t, c);
    hd_fail(j, c->as_world ? HD_ERR_FAILED : HD_ERR_MISMATCH,
            "%s of group '%s' ha%s %s: %s %s it cannot complete (this is rank %d, tag %d%s%s)", who,
            c->name, peer < 0 && c->size > 2 ? "ve" : "s",
            c->as_world ? "left the job" : hd_page_way(way), j->api, hd_peer_is(j), c->rank,
            j->message.tag, j->site[0] ? ", called at " : "", j->site);
    return 1;
}

int hd_peer_has_withdrawn(const hd_comm *c, int rank)
{
    return rank != c->rank && (hd_session_gone(c->session, c->node_slot[rank]) != HD_HERE ||
                               has_closed(c, rank) != HD_OPEN);
}

void hd_peer_withdrawn(hd_job *j, int rank)
{
    hd_comm *c = j->comm;
    char way[HD_DESC];
    hd_text t;
    const enum hd_gone how = hd_session_gone(c->session, c->node_slot[rank]);
    hd_text_init(&t, way, sizeof way);
    if (how)
        hd_say_gone(&t, c, rank, how);
    else
        hd_say(&t, "has %s", hd_page_way(closed_by(c, rank)));
    hd_fail(j, how ? HD_ERR_FAILED : HD_ERR_MISMATCH,
            "rank %d of group '%s' %s: %s to it cannot complete (this is rank %d)", rank, c->name,
            way, j->api, c->rank);
}
