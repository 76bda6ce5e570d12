# The timeout of a wait, as users give it.

cdef double seconds_of(object timeout) except? -2:
    """A timeout in seconds; -1 for none, which is the meaning of torch's negative durations too."""
    if timeout is None:
        return -1
    if hasattr(timeout, "total_seconds"):
        timeout = timeout.total_seconds()
    if not hasattr(timeout, "__float__"):
        raise TypeError(f"timeout must be a datetime.timedelta or seconds, not {type(timeout).__name__}")
    cdef double seconds = timeout
    if seconds != seconds:
        raise ValueError("timeout is not a number")
    return seconds if seconds >= 0 else -1
