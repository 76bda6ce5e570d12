# The mode of this thread's floating-point unit, for sums that torch makes: see hd_float_mode.h.

cdef extern from "hd_float_mode.h" nogil:
    ctypedef uint64_t hd_float_mode
    hd_float_mode hd_float_mode_plain()
    void hd_float_mode_restore(hd_float_mode mode)


cdef class plain_floats:
    """In the block denormals count, and results are rounded to nearest, as in the engine's own sums."""
    cdef hd_float_mode mode

    def __enter__(self):
        self.mode = hd_float_mode_plain()

    def __exit__(self, *exc):
        hd_float_mode_restore(self.mode)
