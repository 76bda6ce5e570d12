/* As much of MPI as the engine's headers name: the programs here run no MPI. */
#ifndef STUB_MPI_H
#define STUB_MPI_H

#include <stdint.h>

typedef int MPI_Comm, MPI_Datatype, MPI_Op, MPI_Info, MPI_Group;
typedef struct stub_request *MPI_Request;
typedef void *MPI_Message;
typedef intptr_t MPI_Aint;
typedef struct MPI_Status {
    int MPI_SOURCE, MPI_TAG, MPI_ERROR, cancelled;
    int64_t bytes;
} MPI_Status;

enum { MPI_SUCCESS = 0, MPI_ERR_TRUNCATE = 15, MPI_ERR_OTHER = 16, MPI_ERR_NO_MEM = 34 };
enum { MPI_THREAD_SINGLE, MPI_THREAD_FUNNELED, MPI_THREAD_SERIALIZED, MPI_THREAD_MULTIPLE };
enum { MPI_COMM_NULL = 0, MPI_COMM_WORLD = 1, MPI_DATATYPE_NULL = 0, MPI_OP_NULL = 0, MPI_INFO_NULL = 0 };
enum { MPI_BYTE = 1, MPI_CHAR, MPI_INT, MPI_INT32_T, MPI_UINT32_T, MPI_INT64_T, MPI_UINT64_T, MPI_DOUBLE };
enum { MPI_MIN = 1, MPI_MAX, MPI_SUM, MPI_BOR };
enum { MPI_ERRORS_RETURN = 1 };
typedef void MPI_User_function(void *in, void *inout, int *n, MPI_Datatype *type);
#define MPI_ANY_SOURCE (-1)
#define MPI_ANY_TAG (-1)
#define MPI_MAX_ERROR_STRING 256
#define MPI_REQUEST_NULL ((MPI_Request)0)
#define MPI_IN_PLACE ((void *)1)
#define MPI_STATUS_IGNORE ((MPI_Status *)0)
#define MPI_STATUSES_IGNORE ((MPI_Status *)0)

/* stub.c has these; all others are left to the program that needs them. */
int MPI_Error_class(int rc, int *class);
int MPI_Error_string(int rc, char *text, int *length);

int MPI_Allreduce(const void *in, void *out, int n, MPI_Datatype type, MPI_Op op, MPI_Comm comm);
int MPI_Iallreduce(const void *in, void *out, int n, MPI_Datatype type, MPI_Op op, MPI_Comm comm, MPI_Request *req);
int MPI_Iallgather(const void *in, int n, MPI_Datatype type, void *out, int m, MPI_Datatype of, MPI_Comm comm,
                   MPI_Request *req);
int MPI_Op_create(MPI_User_function *call, int commute, MPI_Op *op);
int MPI_Op_free(MPI_Op *op);
int MPI_Type_contiguous(int n, MPI_Datatype of, MPI_Datatype *type);
int MPI_Type_commit(MPI_Datatype *type);
int MPI_Type_free(MPI_Datatype *type);
int MPI_Finalized(int *flag);
int MPI_Comm_rank(MPI_Comm comm, int *rank);
int MPI_Comm_size(MPI_Comm comm, int *size);
int MPI_Comm_dup(MPI_Comm comm, MPI_Comm *copy);
int MPI_Comm_free(MPI_Comm *comm);
int MPI_Comm_set_errhandler(MPI_Comm comm, int handler);
int MPI_Isend(const void *data, int n, MPI_Datatype type, int to, int tag, MPI_Comm comm, MPI_Request *req);
int MPI_Irecv(void *data, int n, MPI_Datatype type, int from, int tag, MPI_Comm comm, MPI_Request *req);
int MPI_Iprobe(int from, int tag, MPI_Comm comm, int *flag, MPI_Status *st);
int MPI_Improbe(int from, int tag, MPI_Comm comm, int *flag, MPI_Message *message, MPI_Status *st);
int MPI_Mrecv(void *data, int n, MPI_Datatype type, MPI_Message *message, MPI_Status *st);
int MPI_Testall(int n, MPI_Request *req, int *flag, MPI_Status *st);
int MPI_Test(MPI_Request *req, int *done, MPI_Status *st);
int MPI_Cancel(MPI_Request *req);
int MPI_Wait(MPI_Request *req, MPI_Status *st);
int MPI_Request_free(MPI_Request *req);
int MPI_Test_cancelled(const MPI_Status *st, int *flag);
int MPI_Get_count(const MPI_Status *st, MPI_Datatype type, int *n);
int MPI_Abort(MPI_Comm comm, int code);

#endif
