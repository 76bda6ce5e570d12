"""The server of a TCPStore and its clients' connections, in C without the GIL."""

cimport cython

from cpython.bytes cimport PyBytes_AsStringAndSize, PyBytes_FromStringAndSize
from libc.errno cimport errno
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from posix.unistd cimport getpid

import os

cdef extern from *:
    """
    static int hd_look_at_signals(void)
    {
        PyGILState_STATE state = PyGILState_Ensure();
        int raised = PyErr_CheckSignals();
        PyGILState_Release(state);
        return raised;
    }

    /* lets the exception that a signal handler raised go on its way */
    static PyObject *hd_raised(void) { return NULL; }
    """
    int hd_look_at_signals() noexcept nogil
    object hd_raised()

cdef extern from "Python.h":
    const char *PyUnicode_AsUTF8AndSize(object text, Py_ssize_t *size) except NULL

cdef extern from "hd_mac.h" nogil:
    ctypedef struct hd_mac:
        pass
    void hd_mac_init(hd_mac *m, unsigned out, const void *key, unsigned key_size)
    void hd_mac_update(hd_mac *m, const void *data, size_t size)
    void hd_mac_final(hd_mac *m, uint8_t *result)

cdef extern from "hd_wire.h" nogil:
    enum:
        HD_KEY
        HD_IDENTITY
        HD_OP_SET, HD_OP_GET, HD_OP_ADD, HD_OP_EXCHANGE, HD_OP_CHECK, HD_OP_WAIT, HD_OP_DELETE
        HD_OP_APPEND, HD_OP_PUSH, HD_OP_POP, HD_OP_LENGTH, HD_OP_BARRIER, HD_OP_COUNT, HD_OP_LIST
        HD_OP_JOIN, HD_OP_JOINED
        HD_RE_DONE, HD_RE_LATE, HD_RE_NO_NUMBER, HD_RE_OVERFLOW, HD_RE_FULL, HD_RE_EMPTY
        HD_RE_SIZES, HD_RE_SENSELESS
    ctypedef struct hd_head:
        uint64_t body
        uint32_t id
        uint32_t items
        uint16_t op
        int64_t number
        int64_t wait_ns
    ctypedef struct hd_item:
        const uint8_t *at
        uint64_t size
    int hd_items(const uint8_t *body, uint64_t size, uint32_t count, hd_item *items)
    int64_t hd_clock()

cdef extern from "hd_client.h" nogil:
    enum:
        HD_FINE, HD_TOO_LATE, HD_GONE, HD_SYSTEM, HD_REFUSED, HD_CROWDED, HD_FOREIGN, HD_IMPOSTOR
        HD_NO_MEMORY, HD_SIGNAL
    ctypedef int (*hd_hook)() noexcept nogil
    ctypedef struct hd_client:
        int fd
        uint8_t *identity
    ctypedef struct hd_reply:
        hd_head head
        const uint8_t *body
    void hd_client_init(hd_client *c)
    int hd_client_begin(hd_client *c, int fd, const uint8_t *key, int64_t deadline, hd_hook hook)
    int hd_client_call(hd_client *c, hd_head *head, const hd_item *items, int64_t deadline,
                       hd_hook hook, hd_reply *reply)
    int hd_client_ended(const hd_client *c)
    void hd_client_relax(hd_client *c)
    void hd_client_end(hd_client *c)

cdef extern from "hd_server.h" nogil:
    ctypedef struct hd_limits:
        uint64_t bytes
        int64_t handshake_ns, message_ns, idle_ns, connections, strangers, world_size
    ctypedef struct hd_stats:
        uint64_t keys, bytes, connections, strangers, joined, accepted, refused, dropped
    ctypedef struct hd_server:
        pass
    hd_server *hd_server_start(const int *listeners, int count, const uint8_t *key,
                               const hd_limits *limits)
    void hd_server_stop(hd_server *s)
    void hd_server_stats(hd_server *s, hd_stats *out)
    int hd_server_here(const hd_server *s)


# Requests.
SET, GET, ADD, EXCHANGE = HD_OP_SET, HD_OP_GET, HD_OP_ADD, HD_OP_EXCHANGE
CHECK, WAIT, DELETE, APPEND = HD_OP_CHECK, HD_OP_WAIT, HD_OP_DELETE, HD_OP_APPEND
PUSH, POP, LENGTH, BARRIER = HD_OP_PUSH, HD_OP_POP, HD_OP_LENGTH, HD_OP_BARRIER
COUNT, LIST, JOIN, JOINED = HD_OP_COUNT, HD_OP_LIST, HD_OP_JOIN, HD_OP_JOINED

# Statuses of a reply.
DONE, LATE, NO_NUMBER, OVERFLOW = HD_RE_DONE, HD_RE_LATE, HD_RE_NO_NUMBER, HD_RE_OVERFLOW
FULL, EMPTY, SIZES, SENSELESS = HD_RE_FULL, HD_RE_EMPTY, HD_RE_SIZES, HD_RE_SENSELESS

# Bytes of a key.
KEY_SIZE = HD_KEY

_FAILURES = {
    HD_TOO_LATE: "late", HD_GONE: "gone", HD_SYSTEM: "system", HD_REFUSED: "refused",
    HD_CROWDED: "crowded", HD_FOREIGN: "foreign", HD_IMPOSTOR: "impostor", HD_NO_MEMORY: "memory",
}


class LinkError(Exception):
    """A connection cannot be used any more; ``reason`` is one of a few words."""

    def __init__(self, reason, number=0):
        super().__init__(reason, number)
        self.reason = reason
        self.number = number


cdef object _fail(int rc, int number):
    """Raise the exception of an outcome; after a signal it is already set."""
    if rc == HD_SIGNAL:
        hd_raised()
    if rc == HD_NO_MEMORY:
        raise MemoryError("no memory for a store's reply")
    raise LinkError(_FAILURES[rc], number)


def clock():
    """Nanoseconds of the clock that deadlines use."""
    return hd_clock()


def mac(const uint8_t[::1] data, const uint8_t[::1] key, unsigned size, split=()):
    """The keyed hash of the store's messages, for tests: BLAKE2b. `split`: lengths of pieces."""
    cdef hd_mac m
    cdef uint8_t result[64]
    cdef Py_ssize_t at = 0, n
    if not 1 <= size <= 64 or key.shape[0] > 64:
        raise ValueError("1 to 64 bytes of result, and a key of at most 64")
    hd_mac_init(&m, size, &key[0] if key.shape[0] else NULL, <unsigned>key.shape[0])
    for n in split:
        n = max(0, min(n, data.shape[0] - at))
        if n:
            hd_mac_update(&m, &data[at], n)
        at += n
    if at < data.shape[0]:
        hd_mac_update(&m, &data[at], data.shape[0] - at)
    hd_mac_final(&m, result)
    return PyBytes_FromStringAndSize(<char *>result, size)


@cython.final
cdef class Server:
    """A running server. It ends when this object does.

    Attributes
    ----------
    limit : int
        Bytes of keys and values.
    """
    cdef hd_server *s
    cdef readonly uint64_t limit
    cdef object __weakref__

    def __cinit__(self, list listeners, bytes key, *, uint64_t limit, double handshake,
                  double message, double idle, int64_t connections, int64_t strangers,
                  int64_t world_size):
        cdef int fds[16]
        cdef hd_limits limits
        cdef const uint8_t *secret = key
        cdef int count = <int>len(listeners)
        if len(key) != HD_KEY or not 1 <= count <= 16:
            raise ValueError("a key of 32 bytes and 1 to 16 listening sockets")
        for i in range(count):
            fds[i] = listeners[i]
        self.limit = limit
        limits.bytes = limit
        limits.handshake_ns = <int64_t>(handshake * 1e9)
        limits.message_ns = <int64_t>(message * 1e9)
        limits.idle_ns = <int64_t>(idle * 1e9)
        limits.connections = connections
        limits.strangers = strangers
        limits.world_size = world_size
        self.s = hd_server_start(fds, count, secret, &limits)
        if self.s is NULL:
            raise OSError(errno, os.strerror(errno))

    def stats(self):
        """Counts of keys and bytes, and of connections and their outcomes, as a dict."""
        cdef hd_stats found
        if self.s is NULL or not hd_server_here(self.s):
            return {}
        with nogil:
            hd_server_stats(self.s, &found)
        return found

    def stop(self):
        """End the thread and close all connections."""
        cdef hd_server *s = self.s
        self.s = NULL
        if s is not NULL:
            with nogil:
                hd_server_stop(s)

    def __dealloc__(self):
        if self.s is not NULL:
            with nogil:
                hd_server_stop(self.s)


@cython.final
cdef class Link:
    """One connection to a server; one thread at a time."""
    cdef hd_client c
    cdef readonly int pid
    cdef int64_t used

    def __cinit__(self):
        hd_client_init(&self.c)

    def __init__(self, int fd, bytes key, int64_t deadline):
        """Take over a connected socket; both sides prove that they know the key."""
        cdef const uint8_t *secret = key
        cdef int rc
        if len(key) != HD_KEY:
            raise ValueError("a key has 32 bytes")
        self.pid = getpid()
        with nogil:
            rc = hd_client_begin(&self.c, fd, secret, deadline, hd_look_at_signals)
        if rc != HD_FINE:
            _fail(rc, errno)
        self.used = hd_clock()

    @property
    def identity(self):
        """Random bytes that the server keeps for its lifetime."""
        return PyBytes_FromStringAndSize(<char *>self.c.identity, HD_IDENTITY)

    cdef bint usable(self, int64_t fresh_ns) noexcept:
        """Whether this process made it and, if it was idle for longer, the server has not closed it."""
        if self.pid != getpid():
            return False
        return hd_clock() - self.used <= fresh_ns or not hd_client_ended(&self.c)

    cdef tuple call(self, int op, tuple items, int64_t number, int64_t wait_ns, int64_t deadline):
        """Send a request and wait for the reply: status, number, values."""
        cdef hd_item few[4]
        cdef hd_item *at = few
        cdef hd_head head
        cdef hd_reply reply
        cdef Py_ssize_t count = len(items), size = 0, i
        cdef const char *text
        cdef char *raw
        cdef int rc
        if count > 4:
            at = <hd_item *>malloc(count * sizeof(hd_item))
            if at is NULL:
                raise MemoryError()
        try:
            for i in range(count):
                item = items[i]
                if type(item) is str:
                    text = PyUnicode_AsUTF8AndSize(item, &size)
                else:
                    PyBytes_AsStringAndSize(item, &raw, &size)
                    text = raw
                at[i].at = <const uint8_t *>text
                at[i].size = <uint64_t>size
            head.op = <uint16_t>op
            head.items = <uint32_t>count
            head.number = number
            head.wait_ns = wait_ns
            with nogil:
                rc = hd_client_call(&self.c, &head, at, deadline, hd_look_at_signals, &reply)
        finally:
            if at is not few:
                free(at)
        if rc != HD_FINE:
            _fail(rc, errno)
        self.used = hd_clock()
        values = _values(&reply)
        hd_client_relax(&self.c)
        return reply.head.op, reply.head.number, values

    def close(self):
        """End the connection."""
        hd_client_end(&self.c)

    def __dealloc__(self):
        hd_client_end(&self.c)


cdef list _values(hd_reply *reply):
    cdef hd_item few[4]
    cdef hd_item *at = few
    cdef uint32_t i, count = reply.head.items
    cdef list found = []
    if count == 0:
        return found
    if count > 4:
        at = <hd_item *>malloc(count * sizeof(hd_item))
        if at is NULL:
            raise MemoryError()
    try:
        if hd_items(reply.body, reply.head.body, count, at):
            raise LinkError("impostor")
        for i in range(count):
            found.append(PyBytes_FromStringAndSize(<char *>at[i].at, <Py_ssize_t>at[i].size))
    finally:
        if at is not few:
            free(at)
    return found


@cython.final
cdef class Links:
    """The idle connections of a store: a call takes one, and returns it.

    `most` are kept. One that was idle for more than `fresh_ns` is checked before it is used.
    """
    cdef list idle
    cdef Py_ssize_t most
    cdef int64_t fresh_ns

    def __cinit__(self, Py_ssize_t most, int64_t fresh_ns):
        self.idle = []
        self.most = most
        self.fresh_ns = fresh_ns

    def keep(self, Link link):
        """Keep a connection for the next call."""
        if len(self.idle) < self.most:
            self.idle.append(link)
        else:
            link.close()

    def ask(self, int op, tuple items, int64_t number, int64_t wait_ns, double seconds):
        """Send a request over a connection: status, number, values; None if there is none.

        After an error the connection is closed: the reply may still arrive, and no later call may
        read it.
        """
        cdef Link link
        cdef tuple reply
        while self.idle:
            link = self.idle.pop()
            if not link.usable(self.fresh_ns):
                link.close()
                continue
            try:
                reply = link.call(op, items, number, wait_ns, hd_clock() + <int64_t>(seconds * 1e9))
            except BaseException:
                link.close()
                raise
            self.keep(link)
            return reply
        return None
