/* The stacks of this process, written into the recorder's file when another process or a signal
 * asks for them. The threads that hang need not help. */
#ifndef HD_STACKS_H
#define HD_STACKS_H

/* From now on they can be had. write_python: with the GIL writes all threads' Python stacks to a
 * descriptor, and returns 0; number: a signal that faulthandler answers by doing the same without
 * the GIL, to that descriptor; native: one that takes the main thread's native stack; 0: none. */
void hd_stacks_open(int fd, int number, int native, int (*write_python)(int fd));
/* Python ends: its stacks cannot be had any more. */
void hd_stacks_close(void);

/* By the watchdog, on each tick: answers a question, if there is one. */
void hd_stacks_answer(void);

#endif
