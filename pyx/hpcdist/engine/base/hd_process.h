/* What the kernel says of a process. */
#ifndef HD_PROCESS_H
#define HD_PROCESS_H

#include <stddef.h>
#include <sys/types.h>

/* The state of a process, as ps shows it; 0: there is none. */
char hd_process_state(pid_t pid);
/* It has, though its parent may not have waited for it yet. */
int hd_process_ended(pid_t pid);
/* Its parent, 0 if that is not known, and its name. */
pid_t hd_process_parent(pid_t pid, char *name, size_t room);

#endif
