"""The few DLPack structs that the exchange capsule of torch >= 2.10 fills in (DLPack 1.x ABI)."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

ctypedef struct DLDevice:
    int32_t device_type
    int32_t device_id

ctypedef struct DLDataType:
    uint8_t code
    uint8_t bits
    uint16_t lanes

ctypedef struct DLTensor:
    void* data
    DLDevice device
    int32_t ndim
    DLDataType dtype
    int64_t* shape
    int64_t* strides
    uint64_t byte_offset

ctypedef struct DLPackVersion:
    uint32_t major
    uint32_t minor

ctypedef struct DLManagedTensorVersioned:
    DLPackVersion version
    void* manager_ctx
    void* deleter
    uint64_t flags
    DLTensor dl_tensor

ctypedef int (*tensor_from_object)(void* obj, DLTensor* out) except? -1

ctypedef struct DLPackExchangeAPI:
    DLPackVersion version
    void* prev_api
    void* managed_tensor_allocator
    void* managed_tensor_from_py_object_no_sync
    void* managed_tensor_to_py_object_no_sync
    tensor_from_object dltensor_from_py_object_no_sync
    void* current_work_stream

cdef enum:
    DLPACK_FLAG_BITMASK_READ_ONLY = 1

cdef enum:
    kDLCPU = 1
    kDLCUDAHost = 3

cdef enum:
    kDLInt = 0
    kDLUInt = 1
    kDLFloat = 2
    kDLBfloat = 4
    kDLComplex = 5
    kDLBool = 6
    kDLFloat8_e4m3fn = 10
    kDLFloat8_e4m3fnuz = 11
    kDLFloat8_e5m2 = 12
    kDLFloat8_e5m2fnuz = 13
    kDLFloat8_e8m0fnu = 14
