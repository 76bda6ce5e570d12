/* NaNs in what this rank gives to the others: see hd_nan.h. */
#include <stdlib.h>
#include <string.h>

#include "hd_base.h"
#include "hd_comm.h"
#include "hd_job.h"
#include "hd_kernels.h"
#include "hd_kinds.h"
#include "hd_nan.h"
#include "hd_report.h"
#include "hd_types.h"

int hd_nan_wanted;

void hd_nan_wish(int wanted) { hd_nan_wanted = wanted; }

/* What a collective reads on this rank: its number of segments. */
static int inputs(const hd_job *j, const hd_seg **list)
{
    const int in_place = (j->kind == HD_ALL_REDUCE && !j->nin) || j->kind == HD_BROADCAST;
    *list = in_place ? j->out : j->in;
    if (j->kind == HD_BROADCAST && j->comm->rank != j->root)
        return 0;
    return in_place ? j->nout : j->nin;
}

int hd_nan_find(const hd_job *j, hd_nan *found)
{
    const hd_seg *list;
    const int n = j->comm->on_device ? 0 : inputs(j, &list);
    found->of = 0;
    for (int i = 0; i < n; i++) {
        const int64_t at = hd_find_nan(list[i].ptr, list[i].n, j->dtype);
        if (at < 0)
            continue;
        found->tensor = j->listed && n > 1 ? i : -1;
        found->element = at;
        found->of = list[i].n;
        if (j->listed)
            return 1;
        /* Its blocks are those of one tensor, one after the other. */
        found->element += (list[i].ptr - list[0].ptr) / (int64_t)hd_itemsize(j->dtype);
        found->of = 0;
        for (int k = 0; k < n; k++)
            found->of += list[k].n;
        return 1;
    }
    return 0;
}

static void say_where(hd_text *t, const hd_job *j, const hd_nan *found)
{
    hd_say(t, "NaN at element %lld of %lld", (long long)found->element, (long long)found->of);
    if (j->permuted)
        hd_say(t, " in the order of its memory");
    if (found->tensor >= 0)
        hd_say(t, ", in tensor %d of its list,", found->tensor);
    hd_say(t, " in ");
}

/* The reason as the other ranks quote it. */
static void note_reason(hd_comm *c, hd_job *j, const hd_nan *found)
{
    char here[HD_DESC];
    hd_text t;
    hd_describe_here(here, j);
    free(j->refused);
    j->refused = calloc(1, sizeof *j->refused);
    if (!j->refused)
        return;
    hd_refused_by(j->refused, c->rank);
    hd_text_init(&t, j->refused->text, sizeof j->refused->text);
    say_where(&t, j, found);
    hd_say(&t, "%s", here);
}

static void say_mine(hd_text *t, const hd_comm *c, hd_job *j, const hd_nan *found)
{
    hd_note_site(j);
    say_where(t, j, found);
    hd_say_call(t, c, j);
    hd_say(t, ". ");
}

void hd_nan_refuse(hd_comm *c, hd_job *j, const hd_nan *found)
{
    char buffer[HD_TEXT];
    hd_text t;
    hd_text_init(&t, buffer, sizeof buffer);
    say_mine(&t, c, j, found);
    hd_say_unharmed(&t, c, j);
    note_reason(c, j, found);
    hd_fail(j, HD_ERR_NAN, "%s", buffer);
    j->refusal.why = j->refused ? j->refused->text : "it contains a NaN";
    j->refusal.code = HD_ERR_NAN;
}

void hd_nan_fail_after(hd_comm *c, hd_job *j, const hd_nan *found)
{
    char buffer[HD_TEXT];
    hd_text t;
    hd_text_init(&t, buffer, sizeof buffer);
    say_mine(&t, c, j, found);
    hd_say_last(&t, "It was carried out, since without the entry check the other ranks cannot be "
                    "told of it.");
    hd_fail(j, HD_ERR_NAN, "%s", buffer);
}

int hd_nan_fail_alone(hd_job *j, const char *outcome)
{
    const int64_t at = hd_find_nan(j->in1.ptr, j->in1.n, j->dtype);
    if (at < 0)
        return 0;
    hd_note_site(j);
    hd_fail(j, HD_ERR_NAN,
            "NaN at element %lld of %lld in %s of group '%s' (this is rank %d of %d%s%s): %s",
            (long long)at, (long long)j->in1.n, j->api, j->comm->name, j->comm->rank, j->comm->size,
            j->site[0] ? ", called at " : "", j->site, outcome);
    return 1;
}

void hd_nan_look_at_send(hd_job *j)
{
    if (!j->message.on_device)
        j->message.nan = 1 + hd_find_nan(j->in1.ptr, j->in1.n, j->dtype);
}

void hd_nan_fail_message(hd_job *j)
{
    const int sent = j->kind == HD_SEND;
    int64_t at = j->message.nan - 1;
    if (!sent && !j->message.on_device)
        at = hd_find_nan(j->out1.ptr, j->out1.n, j->dtype);
    if (at < 0)
        return;
    hd_note_site(j);
    hd_fail(j, HD_ERR_NAN,
            "NaN at element %lld of %lld in %s(%s, %lld elements) %s rank %d, tag %d, of group "
            "'%s' (this is rank %d of %d%s%s): %s",
            (long long)at, (long long)j->count, j->api, hd_dtype_name(j->dtype),
            (long long)j->count, sent ? "to" : "from", sent ? j->message.peer : j->message.source,
            j->message.tag, j->comm->name, j->comm->rank, j->comm->size,
            j->site[0] ? ", called at " : "", j->site,
            sent ? "the message was sent as it is" : "the message is in the tensor");
}
