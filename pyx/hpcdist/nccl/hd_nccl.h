/* The subset of NCCL's functions that hpcdist calls. Neither nccl.h nor a CUDA header is needed,
 * and nothing is linked: the library is opened at run time. A cudaStream_t is a pointer here. The
 * numbers and the layout are NCCL's ABI. */
#ifndef HD_NCCL_H
#define HD_NCCL_H

#include <stddef.h>

#define HD_NCCL_FLOOR 21800 /* the first with ncclCommSplit and hd_nccl_config's fields */
#define HD_NCCL_UNDEFINED (-2147483647 - 1)

typedef struct ncclComm *ncclComm_t;
typedef void *hd_stream;
typedef struct {
    char bytes[128];
} hd_nccl_id;

/* The front of ncclConfig_t, to which NCCL only ever appends. NCCL copies `size` bytes and uses its
 * own defaults for fields newer than `version`. */
typedef struct {
    size_t size;
    unsigned magic, version;
    int blocking, cga_cluster_size, min_ctas, max_ctas;
    const char *net_name;
    int split_share;
} hd_nccl_config;

enum {
    HD_NCCL_SUCCESS = 0,
    HD_NCCL_CUDA = 1,
    HD_NCCL_SYSTEM = 2,
    HD_NCCL_INTERNAL = 3,
    HD_NCCL_ARGUMENT = 4,
    HD_NCCL_USAGE = 5,
    HD_NCCL_REMOTE = 6,
    HD_NCCL_IN_PROGRESS = 7
};

/* X(member, symbol, arguments): the functions of 2.18. Enums are passed as int. */
#define HD_NCCL_REQUIRED(X)                                                                        \
    X(get_version, ncclGetVersion, (int *))                                                        \
    X(get_unique_id, ncclGetUniqueId, (hd_nccl_id *))                                              \
    X(init_rank_config, ncclCommInitRankConfig,                                                    \
      (ncclComm_t *, int, hd_nccl_id, int, hd_nccl_config *))                                      \
    X(finalize, ncclCommFinalize, (ncclComm_t))                                                    \
    X(destroy, ncclCommDestroy, (ncclComm_t))                                                      \
    X(abort, ncclCommAbort, (ncclComm_t))                                                          \
    X(split, ncclCommSplit, (ncclComm_t, int, int, ncclComm_t *, hd_nccl_config *))                \
    X(async_error, ncclCommGetAsyncError, (ncclComm_t, int *))                                     \
    X(count, ncclCommCount, (ncclComm_t, int *))                                                   \
    X(device, ncclCommCuDevice, (ncclComm_t, int *))                                               \
    X(user_rank, ncclCommUserRank, (ncclComm_t, int *))                                            \
    X(premul_sum, ncclRedOpCreatePreMulSum, (int *, void *, int, int, ncclComm_t))                 \
    X(op_destroy, ncclRedOpDestroy, (int, ncclComm_t))                                             \
    X(reduce, ncclReduce, (const void *, void *, size_t, int, int, int, ncclComm_t, hd_stream))    \
    X(broadcast, ncclBroadcast, (const void *, void *, size_t, int, int, ncclComm_t, hd_stream))   \
    X(all_reduce, ncclAllReduce, (const void *, void *, size_t, int, int, ncclComm_t, hd_stream))  \
    X(reduce_scatter, ncclReduceScatter,                                                           \
      (const void *, void *, size_t, int, int, ncclComm_t, hd_stream))                             \
    X(all_gather, ncclAllGather, (const void *, void *, size_t, int, ncclComm_t, hd_stream))       \
    X(send, ncclSend, (const void *, size_t, int, int, ncclComm_t, hd_stream))                     \
    X(recv, ncclRecv, (void *, size_t, int, int, ncclComm_t, hd_stream))                           \
    X(group_start, ncclGroupStart, (void))                                                         \
    X(group_end, ncclGroupEnd, (void))

/* Later functions; NULL where the library is older. */
#define HD_NCCL_OPTIONAL(X)                                                                        \
    X(mem_alloc, ncclMemAlloc, (void **, size_t))                                                  \
    X(mem_free, ncclMemFree, (void *))                                                             \
    X(comm_register, ncclCommRegister, (ncclComm_t, void *, size_t, void **))                      \
    X(comm_deregister, ncclCommDeregister, (ncclComm_t, void *))                                   \
    X(init_rank_scalable, ncclCommInitRankScalable,                                                \
      (ncclComm_t *, int, int, int, hd_nccl_id *, hd_nccl_config *))                               \
    X(shrink, ncclCommShrink, (ncclComm_t, int *, int, ncclComm_t *, hd_nccl_config *, int))       \
    X(window_register, ncclCommWindowRegister, (ncclComm_t, void *, size_t, void **, int))         \
    X(window_deregister, ncclCommWindowDeregister, (ncclComm_t, void *))                           \
    X(revoke, ncclCommRevoke, (ncclComm_t, int))                                                   \
    X(all_to_all, ncclAlltoAll, (const void *, void *, size_t, int, ncclComm_t, hd_stream))        \
    X(gather, ncclGather, (const void *, void *, size_t, int, int, ncclComm_t, hd_stream))         \
    X(scatter, ncclScatter, (const void *, void *, size_t, int, int, ncclComm_t, hd_stream))

#define HD_NCCL_MEMBER(member, symbol, arguments) int(*member) arguments;
typedef struct {
    const char *(*error_string)(int);
    const char *(*last_error)(ncclComm_t);
    HD_NCCL_REQUIRED(HD_NCCL_MEMBER)
    HD_NCCL_OPTIONAL(HD_NCCL_MEMBER)
} hd_nccl;
#undef HD_NCCL_MEMBER

/* Opens a library and fills the table. path NULL: the library that is already loaded under the
 * usual name or, with `load`, the system's. Returns NULL on success, or a text that says what is
 * wrong; *found tells whether there was a library at all. The handle is never closed: NCCL has
 * threads. */
const char *hd_nccl_open(hd_nccl *table, const char *path, int load, int *found,
                         const char **where);

/* Polls until the communicator is not in progress, for at most `seconds`; returns its state
 * then. */
int hd_nccl_settle(const hd_nccl *table, ncclComm_t comm, double seconds);

#endif
