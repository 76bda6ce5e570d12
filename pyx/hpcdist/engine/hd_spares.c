/* Spares: see hd_spares.h. */
#include <stdlib.h>
#include <time.h>

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
    if (s->parted && !s->meeting)
        return;
    s->parted = 1;
    if (!s->meeting) {
        s->met_flag = HD_ENDS;
        if (hd_ft_iagree(s->ctl, &s->met_flag, &s->met))
            return;
        s->meeting = 1;
    }
    for (;;) {
        int done = 0;
        if (MPI_Test(&s->met, &done, MPI_STATUS_IGNORE) || done) {
            s->met = MPI_REQUEST_NULL;
            s->meeting = 0;
            return;
        }
        if (hd_now() >= until)
            return;
        nanosleep(&nap, NULL);
    }
}
