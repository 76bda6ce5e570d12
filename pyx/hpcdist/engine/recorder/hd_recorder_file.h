/* The file of the flight recorder, from its making to its end. */
#ifndef HD_RECORDER_FILE_H
#define HD_RECORDER_FILE_H

#include <stdint.h>

/* What the user wishes: how many operations are kept (0: none), and the folder for copies of the
 * file, or "". Before the first hd_rec_open(). */
void hd_rec_wish(int operations, const char *folder);

/* This process's recorder, made at the first call; without room in /dev/shm it lies in private
 * memory. job: the same on all ranks; tidy: remove what processes that ended long ago have left. */
void hd_rec_open(int rank, int size, uint64_t job, int tidy);

/* A place that has changed: `active` ranks, then the spares. */
void hd_rec_place(int rank, int active, int spares);
/* The ranks have a new world after so many deaths, which took this process that many ns; a spare 0.
 */
void hd_rec_recovered(int deaths, int64_t ns);
/* They have their last commit in it; ns: since then. */
void hd_rec_returned(int64_t ns);

/* The path of its file, "" if no other process can read it. */
const char *hd_rec_path(void);

/* At the end of the process: notes it, and copies what has failed. */
void hd_rec_leave(void);
/* Removes the file: an orderly end leaves nothing behind. Other ranks may still read it while they
 * are in operations, so not before MPI has ended. */
void hd_rec_remove(void);
/* In a fork's child: the recorder is its parent's. */
void hd_rec_drop(void);

/* Writes a copy into the folder that the user has named, if any. Safe in a signal handler. 0, or an
 * errno; -1: there is no recorder, or no folder. */
int hd_rec_dump(void);
/* The same into a file. */
int hd_rec_dump_to(const char *path);
/* By the watchdog, on each tick: the same if operations have failed, at most once a second. */
void hd_rec_dump_failed(void);

#endif
