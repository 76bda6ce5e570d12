"""The functions of the NCCL library of this process."""

from hpcdist.libnccl cimport hd_nccl

# Loads the library at the first call; raises DistBackendError where there is none.
cdef const hd_nccl* functions() except NULL
