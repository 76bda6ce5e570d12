/* The error texts of the entry check: which call, on which ranks, called where. */
#include <stdlib.h>
#include <string.h>

#include "hd_base.h"
#include "hd_comm.h"
#include "hd_ft.h"
#include "hd_job.h"
#include "hd_report.h"
#include "hd_status.h"

#define NAMED 4 /* ranks that have gone */

void hd_say_call(hd_text *t, const hd_comm *c, const hd_job *j)
{
    hd_job_describe(t, j);
    hd_say(t, ", collective #%u of group '%s' (this is rank %d of %d", j->seq, c->name, c->rank,
           c->size);
    if (j->site[0])
        hd_say(t, ", called at %s", j->site);
    hd_say(t, ")");
}

void hd_say_refused(hd_text *t, hd_job *j, int code, const hd_refused *by)
{
    const int many = by->n > 1;
    if (!j->refused && (j->refused = malloc(sizeof *by)) != NULL)
        *j->refused = *by;
    hd_say(t, "rank%s %d", many ? "s" : "", by->ranks[0]);
    for (int i = 1; i < by->n && i < HD_REFUSED_RANKS; i++)
        hd_say(t, ", %d", by->ranks[i]);
    if (by->n > HD_REFUSED_RANKS)
        hd_say(t, " and %d more", by->n - HD_REFUSED_RANKS);
    if (code == HD_ERR_MISMATCH)
        hd_say(t, " refused %s arguments: %s", many ? "their" : "its", by->text);
    else if (code == HD_ERR_NAN)
        hd_say(t, " refused %s input: %s", many ? "their" : "its", by->text);
    else
        hd_say(t, " could not take part: %s", by->text);
}

void hd_note_site(hd_job *j)
{
    if (j->inline_ && !j->site[0] && hd_py.site)
        hd_py.site(j);
}

/* "ranks 0, 2: ..." for each different description. */
static void say_variants(hd_text *t, int n, const hd_description *of)
{
    for (int i = 0; i < n; i++) {
        const char *mine = of[i].text;
        int first = 1, many = 0;
        for (int k = 0; k < i && first; k++)
            first = strcmp(of[k].text, mine) != 0;
        if (!first)
            continue;
        for (int k = i + 1; k < n; k++)
            many |= strcmp(of[k].text, mine) == 0;
        hd_say(t, "\n  rank%s %d", many ? "s" : "", i);
        for (int k = i + 1; k < n; k++)
            if (strcmp(of[k].text, mine) == 0)
                hd_say(t, ", %d", k);
        hd_say(t, ": %s", mine[0] ? mine : "(no description arrived)");
    }
}

void hd_describe_call(hd_description *out, hd_job *j)
{
    memset(out, 0, sizeof *out);
    hd_describe_here(out->text, j);
    out->closing = j->closing != 0;
}

int hd_fail_mismatch(hd_comm *c, hd_job *j, const hd_description *of)
{
    char buffer[HD_TEXT];
    int destroyed = 0;
    hd_text t;
    for (int r = 0; r < c->size; r++)
        destroyed |= of[r].closing;
    hd_text_init(&t, buffer, sizeof buffer);
    hd_say(&t, "the ranks of group '%s' disagree about collective #%u (this is rank %d of %d):",
           c->name, j->seq, c->rank, c->size);
    say_variants(&t, c->size, of);
    hd_say(&t, "\n");
    hd_say_outcome(&t, j,
                   destroyed
                       ? ". The group is destroyed and cannot be used any more: destroy it on "
                         "all its ranks."
                   : j->checked.compares
                       ? "; the group can still be used. The results should be the same."
                       : "; the group can still be used. Make all ranks call the same operation "
                         "with matching arguments.");
    hd_fail(j, HD_ERR_MISMATCH, "%s", buffer);
    return j->code;
}

void hd_describe_here(char *out, hd_job *j)
{
    hd_text t;
    hd_note_site(j);
    hd_text_init(&t, out, HD_DESC);
    hd_job_describe(&t, j);
    if (j->site[0])
        hd_say(&t, " at %s", j->site);
}

void hd_say_awaited(char *here, const hd_comm *c, int (*arrived)(const void *context, int rank),
                    const void *context)
{
    hd_text t = {.at = here, .room = HD_DESC, .used = strlen(here)};
    const char *before = ", waiting for rank ";
    for (int r = 0; r < c->size; r++)
        if (r != c->rank && !arrived(context, r)) {
            hd_say(&t, "%s%d", before, r);
            before = ", ";
        }
}

void hd_say_gone(hd_text *t, const hd_comm *c, int rank, enum hd_gone how)
{
    if (how == HD_LEFT)
        hd_say(t, "has left the job (it exited or destroyed its process group)");
    else
        hd_session_report(c->session, c->node_slot[rank], t);
}

void hd_say_outcome(hd_text *t, const hd_job *j, const char *rest)
{
    char buffer[512];
    hd_text last;
    hd_text_init(&last, buffer, sizeof buffer);
    hd_say(&last, "%s%s",
           j->checked.compares ? "The data has moved, and the tensors hold the result"
                               : "Nothing was transferred",
           rest);
    hd_say_last(t, buffer);
}

void hd_say_unharmed(hd_text *t, const hd_comm *c, const hd_job *j)
{
    static const char *const ways[] =
        {[HD_LEFT] = "has left the job", [HD_DIED] = "has died", [HD_FAILED] = "has failed"};
    char buffer[256];
    hd_text last;
    int gone = 0;
    hd_text_init(&last, buffer, sizeof buffer);
    for (int r = 0; r < c->size; r++) {
        const enum hd_gone how =
            r == c->rank ? HD_HERE : hd_session_gone(c->session, c->node_slot[r]);
        if (how && gone++ < NAMED)
            hd_say(&last, "%s rank %d %s", gone > 1 ? "," : "; but meanwhile", r, ways[how]);
    }
    if (gone > NAMED)
        hd_say(&last, " and %d more have gone", gone - NAMED);
    hd_say(&last,
           gone ? ", and the group cannot be used any more." : "; the group can still be used.");
    hd_say_outcome(t, j, buffer);
}

int hd_fail_broken(hd_comm *c, hd_job *j)
{
    char buffer[HD_TEXT];
    hd_text t;
    (void)hd_ft_explains(c->session, MPI_SUCCESS); /* a rank of another node may have broken it */
    hd_note_site(j);
    hd_text_init(&t, buffer, sizeof buffer);
    hd_ft_say_why(c->session, &t);
    hd_say(&t, ": ");
    hd_say_call(&t, c, j);
    hd_say(&t, " fails, as do all operations until the ranks that are left call reconfigure()");
    hd_fail(j, HD_ERR_FAILED, "%s", buffer);
    return j->code;
}

int hd_fail_if_broken(hd_comm *c, hd_job *j)
{
    return hd_ft_on(c->session) && hd_ft_explains(c->session, MPI_SUCCESS) ? hd_fail_broken(c, j)
                                                                           : HD_OK;
}

int hd_fail_if_gone(hd_comm *c, hd_job *j, int (*arrived)(const void *context, int rank),
                    const void *context)
{
    for (int r = 0; r < c->size; r++) {
        const enum hd_gone how =
            r == c->rank ? HD_HERE : hd_session_gone(c->session, c->node_slot[r]);
        /* Gone, and truly not here: the order of these two reads matters. */
        if (how && !arrived(context, r))
            return hd_fail_gone(c, j, r, how);
    }
    return HD_OK;
}

int hd_fail_gone(hd_comm *c, hd_job *j, int rank, enum hd_gone how)
{
    char buffer[HD_TEXT];
    hd_text t;
    hd_note_site(j);
    hd_text_init(&t, buffer, sizeof buffer);
    hd_say(&t, "rank %d of group '%s' ", rank, c->name);
    hd_say_gone(&t, c, rank, how);
    hd_say(&t, " and will not join ");
    hd_say_call(&t, c, j);
    hd_fail(j, HD_ERR_FAILED, "%s", buffer);
    return j->code;
}

int hd_fail_closed(hd_comm *c, hd_job *j, int rank, const char *way)
{
    char buffer[HD_TEXT];
    hd_text t;
    hd_note_site(j);
    hd_text_init(&t, buffer, sizeof buffer);
    hd_say(&t, "rank %d of group '%s' has %s and will not join ", rank, c->name, way);
    hd_say_call(&t, c, j);
    hd_say(&t, ". ");
    hd_say_outcome(&t, j, ". The group cannot be used any more: destroy it on all its ranks.");
    hd_fail(j, HD_ERR_MISMATCH, "%s", buffer);
    return j->code;
}
