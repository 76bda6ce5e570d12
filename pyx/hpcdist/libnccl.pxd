"""NCCL's functions and numbers as hd_nccl.h has them; nothing is linked."""

cdef extern from "hd_nccl.h" nogil:
    enum:
        HD_NCCL_FLOOR
        HD_NCCL_UNDEFINED
        HD_NCCL_SUCCESS
        HD_NCCL_CUDA
        HD_NCCL_SYSTEM
        HD_NCCL_INTERNAL
        HD_NCCL_ARGUMENT
        HD_NCCL_USAGE
        HD_NCCL_REMOTE
        HD_NCCL_IN_PROGRESS
    ctypedef struct ncclComm:
        pass
    ctypedef ncclComm* ncclComm_t
    ctypedef void* hd_stream
    ctypedef struct hd_nccl_id:
        char* bytes
    ctypedef struct hd_nccl_config:
        size_t size
        unsigned magic
        unsigned version
        int blocking
        int cga_cluster_size
        int min_ctas
        int max_ctas
        const char* net_name
        int split_share
    ctypedef struct hd_nccl:
        const char* (*error_string)(int) noexcept nogil
        const char* (*last_error)(ncclComm_t) noexcept nogil
        int (*get_version)(int*) noexcept nogil
        int (*get_unique_id)(hd_nccl_id*) noexcept nogil
        int (*init_rank_config)(ncclComm_t*, int, hd_nccl_id, int, hd_nccl_config*) noexcept nogil
        int (*finalize)(ncclComm_t) noexcept nogil
        int (*destroy)(ncclComm_t) noexcept nogil
        int (*abort)(ncclComm_t) noexcept nogil
        int (*split)(ncclComm_t, int, int, ncclComm_t*, hd_nccl_config*) noexcept nogil
        int (*async_error)(ncclComm_t, int*) noexcept nogil
        int (*count)(ncclComm_t, int*) noexcept nogil
        int (*device)(ncclComm_t, int*) noexcept nogil
        int (*user_rank)(ncclComm_t, int*) noexcept nogil
        int (*premul_sum)(int*, void*, int, int, ncclComm_t) noexcept nogil
        int (*op_destroy)(int, ncclComm_t) noexcept nogil
        int (*reduce)(const void*, void*, size_t, int, int, int, ncclComm_t, hd_stream) noexcept nogil
        int (*broadcast)(const void*, void*, size_t, int, int, ncclComm_t, hd_stream) noexcept nogil
        int (*all_reduce)(const void*, void*, size_t, int, int, ncclComm_t, hd_stream) noexcept nogil
        int (*reduce_scatter)(const void*, void*, size_t, int, int, ncclComm_t, hd_stream) noexcept nogil
        int (*all_gather)(const void*, void*, size_t, int, ncclComm_t, hd_stream) noexcept nogil
        int (*send)(const void*, size_t, int, int, ncclComm_t, hd_stream) noexcept nogil
        int (*recv)(void*, size_t, int, int, ncclComm_t, hd_stream) noexcept nogil
        int (*group_start)() noexcept nogil
        int (*group_end)() noexcept nogil
        int (*mem_alloc)(void**, size_t) noexcept nogil
        int (*mem_free)(void*) noexcept nogil
        int (*comm_register)(ncclComm_t, void*, size_t, void**) noexcept nogil
        int (*comm_deregister)(ncclComm_t, void*) noexcept nogil
        int (*init_rank_scalable)(ncclComm_t*, int, int, int, hd_nccl_id*, hd_nccl_config*) noexcept nogil
        int (*shrink)(ncclComm_t, int*, int, ncclComm_t*, hd_nccl_config*, int) noexcept nogil
        int (*window_register)(ncclComm_t, void*, size_t, void**, int) noexcept nogil
        int (*window_deregister)(ncclComm_t, void*) noexcept nogil
        int (*revoke)(ncclComm_t, int) noexcept nogil
        int (*all_to_all)(const void*, void*, size_t, int, ncclComm_t, hd_stream) noexcept nogil
        int (*gather)(const void*, void*, size_t, int, int, ncclComm_t, hd_stream) noexcept nogil
        int (*scatter)(const void*, void*, size_t, int, int, ncclComm_t, hd_stream) noexcept nogil
    const char* hd_nccl_open(hd_nccl*, const char*, int, int*, const char**)
    int hd_nccl_settle(const hd_nccl*, ncclComm_t, double)
