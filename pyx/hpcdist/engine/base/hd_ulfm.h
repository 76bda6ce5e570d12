/* Whether this MPI has ULFM's extensions, and their declarations. */
#ifndef HD_ULFM_H
#define HD_ULFM_H

#include <mpi.h>

#ifdef OPEN_MPI
#include <mpi-ext.h>
#endif
#if defined(OPEN_MPI) && defined(OMPI_HAVE_MPIX_COMM_GET_FAILED) && defined(MPIX_ERR_REVOKED)
#define HD_HAS_ULFM 1
#endif

#endif
