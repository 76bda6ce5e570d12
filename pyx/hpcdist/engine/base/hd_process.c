/* What the kernel says of a process: man 5 proc_pid_stat. */
#include <stdio.h>
#include <string.h>

#include "hd_process.h"

typedef struct seen {
    char name[64];
    char state;
    int parent;
} seen;

/* 0: there is none. */
static int look(pid_t pid, seen *out)
{
    char path[64], line[512] = "", *begin, *end;
    FILE *f;
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    if (!(f = fopen(path, "re")))
        return 0;
    if (!fgets(line, sizeof line, f))
        line[0] = 0;
    fclose(f);
    begin = strchr(line, '(');
    end = strrchr(line, ')'); /* the name may contain one */
    if (!begin || !end || sscanf(end + 1, " %c %d", &out->state, &out->parent) != 2)
        return 0;
    *end = 0;
    snprintf(out->name, sizeof out->name, "%s", begin + 1);
    return 1;
}

char hd_process_state(pid_t pid)
{
    seen it;
    return (char)(look(pid, &it) ? it.state : 0);
}

int hd_process_ended(pid_t pid)
{
    const char state = hd_process_state(pid);
    return !state || state == 'Z' || state == 'X';
}

pid_t hd_process_parent(pid_t pid, char *name, size_t room)
{
    seen it = {"", 0, 0};
    look(pid, &it);
    snprintf(name, room, "%s", it.name);
    return (pid_t)it.parent;
}
