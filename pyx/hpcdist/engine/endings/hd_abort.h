/* The end of the job. */
#ifndef HD_ABORT_H
#define HD_ABORT_H

void hd_abort(int code, const char *why);
/* Ends this process after some seconds, whatever it does. */
void hd_end_process_soon(int code);
/* The same, but counts only while no other process of the node works: launchers end the job when a
 * rank has left without MPI_Finalize. */
void hd_end_process_after_others(int code);
/* After an unhandled exception: ends the job even if the exit hangs. */
void hd_failing(double grace_s);

#endif
