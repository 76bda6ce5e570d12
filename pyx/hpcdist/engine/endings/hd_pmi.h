/* MPI's requests to a process manager, in a job without a launcher. */
#ifndef HD_PMI_H
#define HD_PMI_H

/* From now on a thread answers MPI's requests on fd. */
int hd_pmi_answer(int fd);
int hd_pmi_active(void); /* 1 after that: the job has no launcher */

#endif
