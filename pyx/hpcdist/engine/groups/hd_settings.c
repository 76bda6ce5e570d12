/* See hd_settings.h. */
#include <stdio.h>
#include <stdlib.h>
#include <strings.h>

#include "hd_comm.h"
#include "hd_ft.h"
#include "hd_levels.h"
#include "hd_ordered.h"
#include "hd_settings.h"
#include "hd_spares.h"

int hd_checks_by_mpi(void)
{
    const char *transport = getenv("HPCDIST_CHECK_TRANSPORT");
    return transport && strcasecmp(transport, "mpi") == 0; /* config.py has refused other words */
}

/* Above the bits of the check level. */
static const struct {
    int bit;
    const char *is;
} settings[] = {
    {8, "HPCDIST_FT is set"},
    {9, "HPCDIST_CHECK_TRANSPORT is mpi"},
    {10, "HPCDIST_TWO_LEVEL is 'on'"},
    {11, "HPCDIST_TWO_LEVEL is 'auto'"},
    {12, "HPCDIST_DETERMINISTIC is 'layout'"},
};
#define SETTINGS (int)(sizeof settings / sizeof *settings)
#define SPARES_BIT 32 /* above them: how many HPCDIST_SPARES says */

uint64_t hd_settings_own(const hd_comm *c)
{
    const enum hd_levels_setting levels = hd_levels_wanted();
    return (uint64_t)c->check | (uint64_t)hd_ft_on(c->session) << settings[0].bit |
           (uint64_t)hd_checks_by_mpi() << settings[1].bit |
           (uint64_t)(levels == HD_LEVELS_ON) << settings[2].bit |
           (uint64_t)(levels == HD_LEVELS_AUTO) << settings[3].bit |
           (uint64_t)hd_ordered_wanted() << settings[4].bit |
           (uint64_t)hd_spares_wanted() << SPARES_BIT;
}

void hd_settings_disagree(const hd_comm *c, uint64_t first, int wrong, uint64_t other, char *text,
                          size_t room)
{
    for (int i = 0; i < SETTINGS; i++) {
        const int set = first >> settings[i].bit & 1;
        if (set == (int)(other >> settings[i].bit & 1))
            continue;
        snprintf(text, room, "group '%s': %s on rank %d, and not on rank %d", c->name,
                 settings[i].is, set ? 0 : wrong, set ? wrong : 0);
        return;
    }
    if (first >> SPARES_BIT != other >> SPARES_BIT)
        snprintf(text, room,
                 "group '%s': HPCDIST_SPARES is %d on rank 0, and %d on rank %d; give it the same "
                 "value on all ranks",
                 c->name, (int)(first >> SPARES_BIT), (int)(other >> SPARES_BIT), wrong);
    else
        snprintf(text, room,
                 "group '%s': rank 0 has entry check level %s, rank %d has %s; give HPCDIST_CHECK "
                 "the same value on all ranks",
                 c->name, hd_level_name(first & 255), wrong, hd_level_name(other & 255));
}
