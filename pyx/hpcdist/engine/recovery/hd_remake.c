/* See hd_remake.h. MPI_Comm_split, and not MPI_Comm_create_group: a revocation ends it, and after
 * it all ranks can agree that all have left it, before one of them may revoke what it has made. */
#include <stdio.h>
#include <stdlib.h>

#include "hd_accord.h"
#include "hd_base.h"
#include "hd_comm_life.h"
#include "hd_ft.h"
#include "hd_page_life.h"
#include "hd_remake.h"
#include "hd_session.h"
#include "hd_status.h"

#define MADE 1
#define ALIVE 2 /* this rank knows of no death */

/* rc: of MPI. */
static int settle(hd_comm *c, int code, int rc)
{
    int flag;
    if (rc)
        (void)hd_ft_explains(c->session, rc);
    flag = (code == HD_OK && !rc ? MADE : 0) | (hd_session_broken(c->session) ? 0 : ALIVE);
    if (hd_accord_reach(c->mpi, &flag))
        flag = 0;
    __atomic_store_n(&c->session->rebuilt_by, 0, __ATOMIC_RELEASE);
    return !(flag & ALIVE) ? HD_ERR_FAILED : flag & MADE ? HD_OK : HD_ERR_BACKEND;
}

static void begin(hd_comm *c)
{
    __atomic_store_n(&c->session->rebuilt_by, hd_until(c->timeout), __ATOMIC_RELEASE);
}

/* Before a call of MPI that a rank without memory cannot make: the others would wait for it. */
static int have_memory(hd_comm *c, int all_of_it)
{
    begin(c);
    return settle(c, all_of_it ? HD_OK : HD_ERR_MEMORY, MPI_SUCCESS);
}

int hd_comm_exchange(hd_comm *c, const void *mine, int n, char **all, int *sizes)
{
    int *starts = calloc((size_t)c->size, sizeof *starts);
    int rc, code;
    size_t total = 0;

    *all = NULL;
    if ((code = have_memory(c, sizes && starts))) {
        free(starts);
        return code;
    }
    begin(c);
    rc = MPI_Allgather(&n, 1, MPI_INT, sizes, 1, MPI_INT, c->mpi);
    for (int r = 0; !rc && r < c->size; r++) {
        starts[r] = (int)total;
        total += (size_t)sizes[r];
    }
    if (!rc)
        *all = malloc(total + 1);
    code = settle(c, *all ? HD_OK : HD_ERR_MEMORY, rc);
    if (code == HD_OK) {
        begin(c);
        rc = MPI_Allgatherv(mine, n, MPI_BYTE, *all, sizes, starts, MPI_BYTE, c->mpi);
        code = settle(c, HD_OK, rc);
    }
    if (code) {
        free(*all);
        *all = NULL;
    }
    free(starts);
    return code;
}

int hd_comm_remake(hd_comm *c, const int *ranks, int n, const char *name, double timeout, int check,
                   hd_comm **out, char *text, size_t room)
{
    MPI_Comm made = MPI_COMM_NULL;
    int place = 0, code, rc;

    *out = NULL;
    if ((code = have_memory(c, ranks != NULL))) {
        snprintf(text, room, "%s has no memory to make groups again",
                 ranks ? "another rank" : "this rank");
        return code;
    }
    while (place < n && ranks[place] != c->rank)
        place++;
    begin(c);
    rc = MPI_Comm_split(c->mpi, n ? ranks[0] : MPI_UNDEFINED, place, &made);
    rc = hd_ft_made_all(c->mpi, rc, &made);
    if (rc)
        snprintf(text, room, "MPI_Comm_split failed while groups were made again");
    else if (n)
        code = hd_comm_open_part(c, made, ranks, name, timeout, check, out, text, room);
    code = settle(c, code, rc);
    if (code && *out) {
        hd_comm_free(*out, 1, HD_KEEP);
        hd_comm_release(*out);
        *out = NULL;
    }
    if (code && !text[0])
        snprintf(text, room, "another rank could not make its group again");
    return code;
}
