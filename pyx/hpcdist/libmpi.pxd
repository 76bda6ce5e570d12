"""MPI declarations: what the Cython side calls itself. The engine's C files include mpi.h."""

cdef extern from "mpi.h" nogil:
    ctypedef void* MPI_Comm  # really an int or a pointer; the C compiler knows
    MPI_Comm MPI_COMM_WORLD
    int MPI_SUCCESS
    int MPI_MAX_LIBRARY_VERSION_STRING
    int MPI_THREAD_SINGLE, MPI_THREAD_FUNNELED, MPI_THREAD_SERIALIZED, MPI_THREAD_MULTIPLE

    int MPI_Init_thread(int*, char***, int, int*)
    int MPI_Initialized(int*)
    int MPI_Finalized(int*)
    int MPI_Query_thread(int*)
    int MPI_Get_library_version(char*, int*)
    int MPI_Comm_rank(MPI_Comm, int*)
    int MPI_Comm_size(MPI_Comm, int*)
