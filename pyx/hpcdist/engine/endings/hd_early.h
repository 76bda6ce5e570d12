/* A rank that ends before MPI has started. */
#ifndef HD_EARLY_H
#define HD_EARLY_H

/* As hd_arm_exit(), for a rank that ends before MPI starts. */
void hd_arm_early(void);
/* 1: the launcher was asked to end the job; see hd_early.c. */
int hd_end_job_early(int status);

#endif
