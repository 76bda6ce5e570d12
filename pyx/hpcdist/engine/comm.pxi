# Comm: the operations of one group. Ranks are the group's own; hpcdist.group translates.

cdef class Comm:
    """One group's communicator and lane.

    Made by :meth:`world`, :meth:`from_handle` and :meth:`create_group`; freed by :meth:`free`. Each operation
    returns None, or a :class:`Work` with ``async_op=True``.
    """

    cdef hd_comm* c
    cdef object __weakref__

    def __init__(self):
        raise TypeError("use Comm.world, Comm.from_handle or create_group")

    def __dealloc__(self):
        if self.c != NULL and not hd_forked:
            hd_comm_release(self.c)

    # ---- create and free ----

    @staticmethod
    def world(str name, double timeout, int check, within=None):
        """Duplicates MPI's world. Collective over all processes of the job.

        Parameters
        ----------
        name : str
            Name of the group in messages.
        timeout : float
            Seconds after which an operation gives up.
        check : int
            Entry check: 0 off, 1 on, 2 full, 3 fast.
        within : float, optional
            Seconds for all ranks to arrive; by default `timeout`.

        Raises
        ------
        DistTimeoutError
            Not all ranks arrived. The call can be repeated.
        """
        return open_root(libmpi.MPI_COMM_WORLD, name, timeout, check, within)

    @staticmethod
    def from_handle(object handle, str name, double timeout, int check, within=None):
        """Duplicates a communicator of the user's, e.g. mpi4py's ``comm.handle``. Collective over it.

        Parameters
        ----------
        handle : int
            The MPI handle as an integer.
        name, timeout, check, within
            As for :meth:`world`.
        """
        # any width and sign: mpi4py passes MPICH's negative int handles as unsigned 64 bit numbers
        return open_root(comm_from_int(<size_t> (int(handle) & 0xFFFFFFFFFFFFFFFF)), name, timeout, check, within)

    def create_group(self, ranks, str name, double timeout, int tag=0, list met=None, check=None):
        """Makes a communicator of some ranks; only they call it.

        Parameters
        ----------
        ranks : sequence of int
            Members, in the numbering of this communicator; their order gives the new ranks.
        name : str
            The same on all members.
        timeout : float
            Seconds; also the new group's timeout.
        tag : int, optional
            Separates groups that different threads make at the same time.
        met : list, optional
            Gets the name as soon as all members have agreed to make the group, whatever is raised then.
        check : int, optional
            The level of the new group's entry check, the same on all members. Default: this one's.

        Returns
        -------
        Comm

        Raises
        ------
        DistTimeoutError, DistMismatchError
            A member did not call it in time; the members named different lists, or levels.
        """
        return some_of(self, ranks, name, timeout, tag, met, check)

    def leave_handler(self):
        """Refuses to be destroyed in a signal handler that runs while this thread waits in the group.

        Raises
        ------
        DistError
            It runs in such a handler.
        """
        if not hd_forked and self.c != NULL:
            refuse_in_handler(self, DESTROY.name)

    def free(self, double drain=5.0, bint agree=True):
        """Waits for what is in flight and frees the communicator. Every member calls it; may be repeated.

        MPI gives the number of a freed communicator to the next one, and with it all messages that
        are still on their way. So the communicator is returned to MPI only if all ranks free it
        within a second, and no message is left that was sent and never received; otherwise
        everything but MPI's part of it is freed.

        Parameters
        ----------
        drain : float, optional
            Seconds to wait for operations in flight.
        agree : bool, optional
            Whether to ask the other ranks; if not, MPI's part is kept. False is for the end of the
            program.

        Raises
        ------
        DistTimeoutError
            Operations did not end in time; nothing is freed, and they keep their tensors.
        """
        free_comm(self, drain, agree)

    @property
    def native(self):
        """Comm: itself; None for every other backend."""
        return self

    @property
    def rank(self):
        """int: this process's rank in the group."""
        return self.c.rank

    @property
    def size(self):
        """int: number of ranks."""
        return self.c.size

    @property
    def name(self):
        """str: the group's name in messages."""
        return self.c.name.decode()

    @property
    def handle(self):
        """int: the MPI communicator, as mpi4py's ``MPI.Comm.fromhandle`` takes it."""
        return <size_t> comm_to_int(self.c.mpi)  # mpi4py takes no negative numbers

    @property
    def uid(self):
        """int: a random number below 2^63, the same on all ranks of this group and on no other group."""
        return self.c.uid >> 1

    @property
    def seq(self):
        """int: collectives begun, modulo 2^32."""
        return self.c.seq

    @property
    def last_agreed(self):
        """bool: the last collective has not failed, as far as is known: True also while one is under way."""
        return self.c.lane.pending or self.c.agreed == self.c.seq

    @property
    def carried(self):
        """int: collectives whose data travelled with the entry check, modulo 2^32."""
        return self.c.carried

    @property
    def packed(self):
        """int: lists of tensors that a reduce_scatter moved as one block, modulo 2^32."""
        return self.c.packed

    @property
    def unread(self):
        """int: messages of the program that this rank has sent, less those it has received; 0 in all when all is in."""
        return self.c.unread

    def count_from_here(self):
        """Make the next collective number 1. Call it on all ranks, with nothing in flight."""
        self.c.seq = self.c.agreed = 0
        hd_session_begin(self.c.session)

    @property
    def timeout(self):
        """float: seconds after which an operation gives up; set the same on all ranks."""
        return self.c.timeout

    @timeout.setter
    def timeout(self, object value):
        cdef double s = seconds_of(value)
        if s == 0:
            raise ValueError("a timeout of zero would end every operation")
        self.c.timeout = s

    @property
    def check(self):
        """int: entry check level, 0 off, 1 on, 2 full, 3 fast; set the same on all ranks, between operations."""
        return self.c.check

    @check.setter
    def check(self, int value):
        if value < 0 or value > 3:
            raise ValueError("check is 0 (off), 1 (on), 2 (full) or 3 (fast)")
        self.c.check = value

    @property
    def chunk(self):
        """int: bytes of one piece of a long reduction; set the same on all ranks, between operations."""
        return self.c.chunk

    @chunk.setter
    def chunk(self, int64_t value):
        if value < 4096:
            raise ValueError(f"a chunk of {value} bytes is too small to be worth a call; 4096 is the least")
        self.c.chunk = value

    @property
    def node_limit(self):
        """int: bytes that memory for reductions within a node may take, 0 for none; the ranks' minimum counts."""
        return self.c.node_limit

    @node_limit.setter
    def node_limit(self, int64_t value):
        if value < 0:
            raise ValueError(f"node_limit is a number of bytes, not {value}")
        self.c.node_limit = value

    @property
    def node_memory(self):
        """int: bytes of that memory; 0 before the first long reduction, and if there is none."""
        return hd_node_bytes(self.c) + hd_levels_bytes(self.c)

    @property
    def on_device(self):
        """bool: tensors are device memory, which MPI takes and the engine never reads; the same on all ranks."""
        return bool(self.c.on_device)

    @on_device.setter
    def on_device(self, bint value):
        self.c.on_device = value

    @property
    def freed(self):
        """bool: whether :meth:`free` was called."""
        return bool(self.c.freed)

    @property
    def checks_through(self):
        """str: what carries the entry check.

        ``shared memory`` within a node; ``shared memory and MPI`` between nodes, where one rank of each votes for
        its node; else ``MPI``.
        """
        if self.c.page != NULL:
            return "shared memory"
        return "shared memory and MPI" if hd_post_by_nodes(self.c) else "MPI"

    @property
    def supports_window(self):
        """bool: whether the ranks can use each other's memory: as it is, or by messages."""
        return self.c.page != NULL or self.c.size == 1 or self.serves_windows

    @property
    def serves_windows(self):
        """bool: whether they can by messages: with MPI_THREAD_MULTIPLE; the same on all ranks that MPI gave the same."""
        return not hd_session_serialized(self.c.session)

    @property
    def node_ranks(self):
        """tuple of int: the ranks of this group that share this node."""
        ranks = tuple(r for r in range(self.c.size) if self.c.node_slot[r] >= 0)
        return ranks or (self.c.rank,)

    @property
    def local_rank(self):
        """int: position of this rank among :attr:`node_ranks`."""
        return self.node_ranks.index(self.c.rank)

    @property
    def cpus(self):
        """tuple of int: CPUs this process may use, and CPUs all ranks of the node together may use."""
        cdef int own, node
        check_alive(self)
        hd_session_cpus(self.c.session, &own, &node)
        return own, node

    # ---- reductions ----

    def all_reduce(self, tensor, op=ReduceOp.SUM, object async_op=False, *, api=None, extra=0, source=None):
        """Reduces a tensor over all ranks, in place. See :func:`hpcdist.all_reduce`.

        source : tensor, optional
            What to reduce instead, of the same dtype, shape and strides, in host memory. It does not change; the
            result goes to `tensor`. Other ranks need not pass one.
        """
        api = ALL_REDUCE if api is None else api_named(api, ALL_REDUCE)
        return one_tensor(self, HD_ALL_REDUCE, api, tensor, None, op, async_op, extra, source)

    def all_reduce_coalesced(self, tensors, op=ReduceOp.SUM, object async_op=False):
        """Reduces several tensors of one dtype with one entry check. See :func:`hpcdist.all_reduce_coalesced`."""
        return reduce_several(self, tensors, op, async_op)

    def reduce(self, tensor, object root, op=ReduceOp.SUM, object async_op=False, *, api=None):
        """Reduces a tensor to one rank. See :func:`hpcdist.reduce`."""
        return one_tensor(self, HD_REDUCE, api_named(api, REDUCE), tensor, root, op, async_op, 0)

    def reduce_scatter(self, output, inputs, op=ReduceOp.SUM, object async_op=False, *, api=None):
        """Reduces a list and leaves one entry on each rank. See :func:`hpcdist.reduce_scatter`."""
        return reduce_list(self, api_named(api, REDUCE_SCATTER), output, inputs, op, async_op)

    def reduce_scatter_tensor(self, output, input, op=ReduceOp.SUM, object async_op=False, *, api=None):
        """Reduces a tensor and leaves one block on each rank. See :func:`hpcdist.reduce_scatter_tensor`."""
        api = api_named(api, REDUCE_SCATTER_TENSOR)
        return one_of_blocks(self, HD_REDUCE_SCATTER, api, output, input, op, async_op, 0)

    # ---- one to all, all to one ----

    def broadcast(self, tensor, object root, object async_op=False, *, api=None, extra=0):
        """Copies the root's tensor to all ranks. See :func:`hpcdist.broadcast`."""
        return one_tensor(self, HD_BROADCAST, api_named(api, BROADCAST), tensor, root, None, async_op, extra)

    def gather(self, tensor, gather_list, object root, object async_op=False, *, api=None, extra=0):
        """Collects one tensor from each rank at the root. See :func:`hpcdist.gather`."""
        return rooted(self, HD_GATHER, api_named(api, GATHER), tensor, gather_list, root, async_op, extra)

    def scatter(self, tensor, scatter_list, object root, object async_op=False, *, api=None, extra=0):
        """Sends one tensor of the root's list to each rank. See :func:`hpcdist.scatter`."""
        return rooted(self, HD_SCATTER, api_named(api, SCATTER), tensor, scatter_list, root, async_op, extra)

    # ---- all to all ----

    def all_gather(self, outputs, tensor, object async_op=False, *, api=None):
        """Collects every rank's tensor on all ranks. See :func:`hpcdist.all_gather`."""
        return gather_lists(self, api_named(api, ALL_GATHER), outputs, [tensor], False, async_op)

    def all_gather_coalesced(self, output_lists, inputs, object async_op=False):
        """Collects several tensors with one entry check. See :func:`hpcdist.all_gather_coalesced`.

        output_lists has one list per rank, each with one tensor per input.
        """
        return gather_lists(self, ALL_GATHER_COALESCED, output_lists, inputs, True, async_op)

    def all_gather_into_tensor(self, output, input, object async_op=False, *, api=None, extra=0):
        """Collects every rank's tensor into one. See :func:`hpcdist.all_gather_into_tensor`."""
        api = api_named(api, ALL_GATHER_INTO)
        return one_of_blocks(self, HD_ALL_GATHER, api, output, input, None, async_op, extra)

    def all_to_all(self, outputs, inputs, object async_op=False, *, api=None):
        """Sends one tensor to and receives one from each rank. See :func:`hpcdist.all_to_all`."""
        return exchange_lists(self, api_named(api, ALL_TO_ALL), outputs, inputs, async_op)

    def all_to_all_single(
        self, output, input, output_splits=None, input_splits=None, object async_op=False, *, api=None
    ):
        """Sends one block to and receives one from each rank. See :func:`hpcdist.all_to_all_single`."""
        api = api_named(api, ALL_TO_ALL_SINGLE)
        return exchange_blocks(self, api, output, input, output_splits, input_splits, async_op)

    def barrier(self, object async_op=False, *, api=None, monitored=None):
        """Waits until all ranks have arrived. See :func:`hpcdist.barrier`.

        monitored: seconds; for :func:`hpcdist.monitored_barrier`.
        """
        cdef hd_job j
        begin(&j, self, HD_BARRIER, api_named(api, BARRIER))
        if monitored is not None:
            j.monitored = 1
            j.timeout = monitored
        return run(self, &j, async_op, None, [])

    def refuse(self, object error, *, api=None, others_arrive=None, bint begun=False, int parts=1):
        """Takes part in the next collective with the reason why this rank cannot make it.

        The other ranks raise :class:`hpcdist.DistMismatchError` with the reason at once, and all ranks stay in step.
        Does not wait for them. The operations do the same for invalid arguments. The exception's ``refusal`` has the
        reason and the ranks that have it.

        Parameters
        ----------
        error : BaseException
            The reason. One that is not an Exception, such as KeyboardInterrupt, counts only for a part.
        api : str, optional
            Public name of the operation.
        begun : bool, optional
            It is part of an operation that the ranks have begun and this one cannot finish: no rank's arguments are
            wrong, and the others raise :class:`hpcdist.DistBackendError`.
        others_arrive : str, optional
            For a part of an operation that was begun: ``"if agreed"``, the others arrive at it if all agreed on the
            part before; ``"always"``, they arrive at it in any case. They then raise :class:`hpcdist.DistError`.
        parts : int, optional
            Number of parts, one after the other. Whether the others arrive at them is one question, which may be
            decided only after this call, when the operations in flight have ended.
        """
        refuse_parts(self, error, api_named(api, BARRIER), others_arrive, begun, parts)

    def give_up(self):
        """Gives up the operations in flight: an exception has ended the work that they were for.

        If they fail, the caller has seen that, so the operations it begins from now on do not fail with them.
        """
        if not hd_forked and self.c != NULL and not self.c.freed:
            hd_lane_give_up(self.c)

    def share(self, int64_t nbytes, *, api=None):
        """Memory that all ranks of the node map: a :class:`Block`, or None: there is none. See :func:`hpcdist.empty`."""
        return share_block(self, nbytes, api)

    def place(self, tensor):
        """Where a tensor lies in such memory of this group: the block and the bytes before it; or None."""
        return place_of(self, tensor)

    def part(self, int rank, uint64_t block, int64_t at, int64_t nbytes):
        """A :class:`Part`: the bytes at such a place of a rank."""
        return part_of(self, rank, block, at, nbytes)

    def accumulate(self, Part part, target, source, op, seconds=None):
        """Combines source into target, which lies in the part, if it is not None, one rank at a time."""
        accumulate_into(self, part, target, source, op, seconds)

    def expose(self, int64_t window, tensor):
        """Lets the other ranks use a tensor by messages, as a window's: an :class:`Exposed`."""
        return exposed(self, window, tensor)

    def refuse_withdrawn(self, int rank, str api):
        """Raises if a rank, whose window memory is about to be used, has destroyed the group or left the job."""
        refuse_withdrawn_rank(self, rank, api)

    def refuse_nan(self, tensor, api):
        """Raises :class:`hpcdist.DistNaNError` if this rank looks for NaNs and the tensor, C-contiguous, contains one."""
        refuse_nan_in(self, tensor, api)

    def finished(self, list outputs):
        """A :class:`Work` that is complete."""
        return finished_work(self, outputs)

    # ---- point to point ----

    def isend(self, tensor, int dst, tag=0, *, bint on_device=False, int tag_kind=0, api=None):
        """Starts a send; on_device: from an address in device memory. See :func:`hpcdist.isend`.

        A tag_kind of OBJECTS, SIGNAL, ANNOUNCEMENT or PIECE matches receives of that kind, and no user's.
        """
        name = SIGNALS if tag_kind == HD_SIGNAL else api_named(api, ISEND)
        return post(self, tensor, dst, tag_of(self, tag), HD_SEND, name, on_device, tag_kind)

    def irecv(self, tensor, int src=-1, tag=0, *, bint on_device=False, int tag_kind=0, api=None):
        """Starts a receive; src -1 is any rank; on_device as for isend. See :func:`hpcdist.irecv`."""
        name = WAIT_SIGNAL if tag_kind == HD_SIGNAL else api_named(api, IRECV)
        return post(self, tensor, src, tag_of(self, tag), HD_RECV, name, on_device, tag_kind)

    def send(self, tensor, int dst, tag=0):
        """Sends, and returns when the tensor may be changed. See :func:`hpcdist.send`."""
        transfer(self, tensor, dst, tag_of(self, tag), HD_SEND, SEND)

    def recv(self, tensor, int src=-1, tag=0):
        """Receives; src -1 is any rank; returns the sender. See :func:`hpcdist.recv`."""
        return transfer(self, tensor, src, tag_of(self, tag), HD_RECV, RECV)

    def batch_isend_irecv(self, operations):
        """Starts messages, all receives before the first send. See :func:`hpcdist.backends.dispatch.batch`."""
        return post_all(self, list(operations), False)

    def look_at_batch(self, operations):
        """Raises what batch_isend_irecv would raise before it starts anything."""
        post_all(self, list(operations), True)

    def __repr__(self):
        return f"<hpcdist._engine.Comm '{self.name}', rank {self.c.rank} of {self.c.size}>"
