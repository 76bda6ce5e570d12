/* MPI_Datatypes and MPI_Ops for every element type and reduce operation; compiled into the engine
 * together with the kernels. */
#ifndef HD_MPI_OPS_H
#define HD_MPI_OPS_H

#include <mpi.h>

#include "hd_types.h"

/* Creates our own MPI_Ops. MPI must be up; a second call does nothing. Returns an MPI error code
 * (MPI_SUCCESS, or that of the MPI_Op_create that failed, with nothing left behind). Two threads
 * must not call it at once. */
HD_LOCAL int hd_mpi_ops_init(void);

/* Frees them; harmless when there are none or MPI is finalized. hd_mpi_ops_init may follow. */
HD_LOCAL void hd_mpi_ops_free(void);

/* The MPI type that moves this dtype: float16 and bfloat16 travel as MPI_UINT16_T, bool and float8
 * as MPI_UINT8_T. MPI_DATATYPE_NULL for an invalid code. */
HD_LOCAL MPI_Datatype hd_mpi_type(int dtype);

/* The MPI_Op to use with hd_mpi_type(dtype): MPI's own where it is exact, else one over our
 * kernels. AVG and PREMUL_SUM give SUM's. MPI_OP_NULL when unsupported, and for our own before
 * init. */
HD_LOCAL MPI_Op hd_mpi_op(int op, int dtype);

#endif
