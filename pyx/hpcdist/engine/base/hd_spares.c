/* Spares: see hd_spares.h. */
#include <stdlib.h>
#include <time.h>

#include "hd_accord.h"
#include "hd_base.h"
#include "hd_ft.h"
#include "hd_session.h"
#include "hd_spares.h"

static int wanted;

void hd_spares_want(int n) { wanted = n; }
int hd_spares_wanted(void) { return wanted; }

int hd_spares_has(const hd_session *s) { return s->active < s->size; }
int hd_spares_is(const hd_session *s) { return s->rank >= s->active; }

int hd_spares_assign(const int *came_from, int n, int active, int *who, int *place)
{
    int survivors = 0, spare, next = 0, made = 0;
    while (survivors < n && came_from[survivors] < active)
        survivors++;
    if (!survivors)
        return 0;
    spare = survivors;
    for (int number = 0; number < active; number++) {
        if (next < survivors && came_from[next] == number)
            who[made] = next++;
        else if (spare < n)
            who[made] = spare++;
        else
            continue;
        place[made++] = number;
    }
    for (int i = made; spare < n; i++, spare++) {
        who[i] = spare;
        place[i] = came_from[spare];
    }
    return made;
}

void hd_spares_farewell(hd_session *s, double seconds)
{
    const struct timespec nap = {0, 1000000};
    const int64_t until = hd_until(seconds);
    int down = 0;
    MPI_Finalized(&down);
    if (down || !s->ft || !hd_spares_has(s) || hd_spares_is(s))
        return;
    if (s->parted && !s->met.begun)
        return;
    s->parted = 1;
    if (!s->met.begun)
        hd_accord_begin(&s->met, HD_ENDS, 1);
    while (!hd_accord_say(&s->met, s->ctl)) {
        int done = 0;
        const int rc = MPI_Test(&s->met.request, &done, MPI_STATUS_IGNORE);
        if (rc && !hd_accord_has_word(rc))
            s->met.begun = s->met.going = 0;
        if ((rc || done) && (!s->met.begun || hd_accord_heard(&s->met)))
            return;
        if (hd_now() >= until)
            return;
        nanosleep(&nap, NULL);
    }
}
