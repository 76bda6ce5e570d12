/* A relay of the connection to MPICH's launcher, around MPI_Init: see hd_pmi_relay.c. */
#ifndef HD_PMI_RELAY_H
#define HD_PMI_RELAY_H

void hd_pmi_relay_begin(void);
void hd_pmi_relay_end(void);

#endif
