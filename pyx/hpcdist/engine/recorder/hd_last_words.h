/* What a process says at its end, so that the launcher and the user can read it. */
#ifndef HD_LAST_WORDS_H
#define HD_LAST_WORDS_H

/* Writes a line to stderr, if there is room for it within half a second: for threads that must not
 * wait for a reader. */
void hd_tell(const char *line);
/* Writes a line to stderr, and wherever hd_abort_tell() says. */
void hd_last_words(const char *why);
/* Where the reason goes besides stderr; -1: nowhere. */
void hd_abort_tell(int fd);
/* Waits until the launcher has read this process's output. */
void hd_until_read(void);

#endif
