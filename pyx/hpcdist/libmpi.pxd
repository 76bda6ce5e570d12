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
    ctypedef void* MPI_Info
    int MPI_Comm_get_info(MPI_Comm, MPI_Info*)
    int MPI_Info_get(MPI_Info, const char*, int, char*, int*)
    int MPI_Info_free(MPI_Info*)

    # for _bench
    ctypedef void* MPI_Datatype
    ctypedef void* MPI_Op
    ctypedef void* MPI_Request
    ctypedef void* MPI_Errhandler
    ctypedef struct MPI_Status:
        pass
    MPI_Comm MPI_COMM_NULL
    MPI_Op MPI_OP_NULL
    MPI_Errhandler MPI_ERRORS_RETURN
    void* MPI_IN_PLACE
    MPI_Status* MPI_STATUS_IGNORE
    MPI_Status* MPI_STATUSES_IGNORE
    int MPI_MAX_ERROR_STRING

    int MPI_Comm_dup(MPI_Comm, MPI_Comm*)
    int MPI_Comm_free(MPI_Comm*)
    int MPI_Comm_set_errhandler(MPI_Comm, MPI_Errhandler)
    int MPI_Error_string(int, char*, int*)
    int MPI_Barrier(MPI_Comm)
    int MPI_Allreduce(const void*, void*, int, MPI_Datatype, MPI_Op, MPI_Comm)
    int MPI_Iallgather(const void*, int, MPI_Datatype, void*, int, MPI_Datatype, MPI_Comm, MPI_Request*)
    int MPI_Iallreduce(const void*, void*, int, MPI_Datatype, MPI_Op, MPI_Comm, MPI_Request*)
    int MPI_Ialltoall(const void*, int, MPI_Datatype, void*, int, MPI_Datatype, MPI_Comm, MPI_Request*)
    int MPI_Ibarrier(MPI_Comm, MPI_Request*)
    int MPI_Ibcast(void*, int, MPI_Datatype, int, MPI_Comm, MPI_Request*)
    int MPI_Igather(const void*, int, MPI_Datatype, void*, int, MPI_Datatype, int, MPI_Comm, MPI_Request*)
    int MPI_Ireduce(const void*, void*, int, MPI_Datatype, MPI_Op, int, MPI_Comm, MPI_Request*)
    int MPI_Ireduce_scatter_block(const void*, void*, int, MPI_Datatype, MPI_Op, MPI_Comm, MPI_Request*)
    int MPI_Iscatter(const void*, int, MPI_Datatype, void*, int, MPI_Datatype, int, MPI_Comm, MPI_Request*)
    int MPI_Wait(MPI_Request*, MPI_Status*)
    int MPI_Bcast(void*, int, MPI_Datatype, int, MPI_Comm)
    int MPI_Reduce(const void*, void*, int, MPI_Datatype, MPI_Op, int, MPI_Comm)
    int MPI_Reduce_scatter_block(const void*, void*, int, MPI_Datatype, MPI_Op, MPI_Comm)
    int MPI_Allgather(const void*, int, MPI_Datatype, void*, int, MPI_Datatype, MPI_Comm)
    int MPI_Alltoall(const void*, int, MPI_Datatype, void*, int, MPI_Datatype, MPI_Comm)
    int MPI_Gather(const void*, int, MPI_Datatype, void*, int, MPI_Datatype, int, MPI_Comm)
    int MPI_Scatter(const void*, int, MPI_Datatype, void*, int, MPI_Datatype, int, MPI_Comm)
    int MPI_Send(const void*, int, MPI_Datatype, int, int, MPI_Comm)
    int MPI_Recv(void*, int, MPI_Datatype, int, int, MPI_Comm, MPI_Status*)
    int MPI_Isend(const void*, int, MPI_Datatype, int, int, MPI_Comm, MPI_Request*)
    int MPI_Irecv(void*, int, MPI_Datatype, int, int, MPI_Comm, MPI_Request*)
    int MPI_Waitall(int, MPI_Request*, MPI_Status*)
