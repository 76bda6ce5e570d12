"""The start of the world: resolve the request, meet, start MPI, make the group."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from hpcdist import _engine, config, debug_level, log
from hpcdist.backends import cuda, mpi, registry
from hpcdist.backends.base import BackendOptions
from hpcdist.backends.carrier import Carrier
from hpcdist.backends.create import create
from hpcdist.backends.dispatch import combine
from hpcdist.backends.registry import Backend, BackendConfig
from hpcdist.errors import DistError
from hpcdist.groups import state as _group
from hpcdist.groups.limits import limit_of, seconds_of
from hpcdist.groups.queries import get_default_backend_for_device, is_backend_available
from hpcdist.groups.state import ProcessGroup
from hpcdist.startup import attendance, checks, commits, spares, steps, variables
from hpcdist.startup.rendezvous import rendezvous
from hpcdist.startup.rendezvous.urls import stated
from hpcdist.store.prefix import prefixed

if TYPE_CHECKING:
    import torch

#: Held while this process starts its world.
_starting = threading.Lock()


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
    group_name: str = "",
    pg_options: Any = None,
    device_id: torch.device | int | str | None = None,
    *,
    enable_reconfigure: bool = False,
) -> None:
    """Make the default group, of all processes of the job.

    All processes must call it. Under mpirun, srun or torchrun no argument is needed; without a
    launcher the process is a world of one. With MPICH and its derivatives, processes that no MPI
    launcher started become one MPI job through their store; Open MPI cannot do that, and the error
    shows the mpirun command to use.

    Parameters
    ----------
    backend : str, optional
        ``"mpi"``, ``"cpu:mpi,cuda:nccl"`` or the name of a registered backend. MPI serves
        ``"gloo"`` too, and says so once. None means the
        default backend of `device_id`'s type; without a `device_id` MPI, and NCCL for CUDA tensors
        where torch can use a GPU and there is a libnccl.so.2. Without that library MPI moves CUDA
        tensors too.
    init_method : str, optional
        URL that says how the processes meet: ``"mpi://"``, ``"env://"``,
        ``"tcp://host:port?rank=&world_size="``, ``"file:///path?rank=&world_size="`` or one of a
        registered scheme. None means ``"mpi://"``. Without an MPI launcher it means ``"env://"``
        under torchrun, where a script has set RANK, WORLD_SIZE and MASTER_ADDR, and where it has
        set MASTER_ADDR and passes `rank` and `world_size`.
    timeout : datetime.timedelta, optional
        After this long a missing peer is an error. None means the setting ``HPCDIST_TIMEOUT``, 30
        minutes by default.
    world_size : int
        Number of processes; -1 takes it from the launcher or the URL. Under an MPI launcher it is
        only compared with MPI's.
    rank : int
        This process's rank; -1 takes it from the launcher or the URL. Under an MPI launcher it is
        only compared with MPI's.
    store : object, optional
        Key-value store shared by the processes, in place of `init_method`, with `rank` and
        `world_size`: an :class:`hpcdist.Store` or one of torch's.
    group_name : str
        Name of the group in messages; empty means ``"world"``.
    pg_options : object, optional
        Options of the backend: :class:`hpcdist.MPIOptions`, for example with a communicator of
        mpi4py as the world.
    device_id : torch.device, int or str, optional
        Device this process uses; an int is the index of a CUDA device. Over NCCL the communicator
        is then created now, and not at the first operation; either all ranks give one, or none.
    enable_reconfigure : bool
        Go on without ranks that die, as with ``HPCDIST_FT=1``; the same on all ranks. The default
        group exists at once, also with True. See :meth:`ProcessGroup.reconfigure`. Where MPI has
        no fault tolerance, or was not started with it, rank 0 logs a warning that says why.

    Raises
    ------
    ValueError
        If the default group exists already or another thread is making it, or the arguments
        contradict each other or MPI, or the URL is incomplete.
    TypeError
        If an argument is of the wrong type.
    DistNetworkError
        If the init method is unknown, or the store cannot be reached.
    DistBackendError
        If the backend is not available here, or the launcher started several processes and MPI sees
        one: then the message names the right launcher or srun plugin.
    DistMismatchError
        On all ranks that called, if two are the same rank, or they disagree on the world size or
        the backend.
    DistTimeoutError
        On all ranks that called, if others do not call within the timeout; it names those of this
        node. If MPI itself waits for them while it starts, no exception is possible: the job ends
        with the same message.

    Notes
    -----
    Source: ``torch.distributed.init_process_group``.
    """
    tolerant = bool(enable_reconfigure or config.get("ft"))
    with _first_and_alone():
        log.configure(debug_level.log_level())
        aside = spares.wanted()
        request = _checked_request(
            backend,
            init_method,
            timeout,
            world_size,
            rank,
            store,
            group_name,
            pg_options,
            device_id,
            aside,
        )
        place = _meet(request)
        with contextlib.ExitStack() as starting:
            place = _start_mpi(request, place, starting)
            _engine.want_fault_tolerance(tolerant)
            backends = _make(request, place)
        _open(request, place, backends, tolerant)
        comm = _group.world.comm
        commits.expect_end(comm.native, comm.rank)
        if tolerant and not aside:
            checks.report_fault_tolerance(comm)


@contextlib.contextmanager
def _first_and_alone() -> Iterator[None]:
    """One start at a time in this process, and none where there is a default group."""
    # Not waited for: a signal handler in the middle of the start would wait for its own thread.
    if not _starting.acquire(blocking=False):
        raise ValueError(
            "another call of init_process_group() in this process has not ended, in another thread "
            "or interrupted by this one: call it once, and let other threads wait for it"
        )
    try:
        if _group.is_initialized():
            raise ValueError(
                "the default process group exists already: call hpcdist.destroy_process_group() "
                "before another init_process_group()"
            )
        yield
    finally:
        _starting.release()


@dataclass(frozen=True)
class _Request:
    """The caller's request, with the defaults filled in."""

    #: The backend that the caller named, and the one that serves.
    asked: str
    kind: str
    config: BackendConfig
    store: Any
    #: The init URL; a description for messages if the caller passed a store.
    method: str
    #: As the caller stated them; -1: not stated.
    rank: int
    size: int
    limit: timedelta
    #: When the start must be over, of ``time.monotonic``.
    end: float
    name: str
    options: Any
    device_id: Any
    #: Whether the caller named the backend.
    named: bool
    #: Whether a backend runs over MPI.
    needs_mpi: bool
    #: Whether MPI would start here as a world of one.
    alone: bool
    #: How many of the processes are to be spares.
    spares: int

    @property
    def meets_over_mpi(self) -> bool:
        return self.store is None and urlsplit(self.method).scheme == "mpi"

    @property
    def own_world(self) -> bool:
        """Whether the caller passes a communicator that becomes the world."""
        return isinstance(self.options, mpi.MPIOptions) and self.options.comm is not None


@dataclass(frozen=True)
class _Place:
    """This process's place in the world, as far as it is known; -1 where it is not."""

    rank: int
    size: int
    #: The keys of this start; None where the processes met without a store.
    store: Any = None
    meeting: Any = None
    #: How MPI contradicts the caller.
    problem: str = ""


def _checked_request(
    backend: str | None,
    init_method: str | None,
    timeout: timedelta | None,
    size: int,
    rank: int,
    store: Any,
    name: str,
    options: Any,
    device_id: Any,
    aside: int,
) -> _Request:
    """Check the arguments, and fill in the defaults."""
    if not isinstance(name, str):
        raise TypeError(f"group_name must be a str, not {type(name).__name__}: {name!r}")
    if name.encode(errors="replace").decode() != name:
        raise ValueError(f"group_name must be text that UTF-8 can encode, not {name!a}")
    if store is not None and init_method is not None:
        raise ValueError("give either init_method or store, not both")
    asked = Backend(backend) if backend is not None else _default_backend(device_id)
    kind = registry.substitute(asked)
    backends = BackendConfig(kind)
    limit = _timeout(timeout)
    needs_mpi = Backend.MPI in backends.get_device_backend_map().values()
    alone = needs_mpi and steps.alone()
    expected, method = size, "the given store"
    if store is None:
        method = init_method or steps.default_method(needs_mpi, rank, size)
        expected = steps.expected_size(method, size)
    elif size <= 0 or rank < 0:
        raise ValueError(
            f"a store needs rank and world_size too: got rank={rank}, world_size={size}"
        )
    if alone:
        steps.refuse_without_launcher(expected)
    return _Request(
        asked,
        kind,
        backends,
        store,
        method,
        rank,
        size,
        limit,
        time.monotonic() + limit.total_seconds(),
        name or "world",
        options,
        device_id,
        backend is not None,
        needs_mpi,
        alone,
        aside,
    )


def _meet(request: _Request) -> _Place:
    """Find the other processes, and call the roll if there is a store."""
    store, rank, size = request.store, request.rank, request.size
    if store is None:
        store, rank, size = next(rendezvous(request.method, rank, size, timeout=request.limit))
    if store is None:
        return _Place(rank, size)
    wanted = repr(request.config)
    meeting = steps.meet(store, rank, size, request.limit, request.method, wanted)
    # the keys differ from those of any other start
    return _Place(rank, size, prefixed(meeting.store, meeting.name), meeting)


def _start_mpi(request: _Request, place: _Place, starting: contextlib.ExitStack) -> _Place:
    """Start MPI if it is needed, and return the place that it assigns to this process.

    Contexts that must last until the backends are made are entered into `starting`.
    """
    if not (request.meets_over_mpi or request.needs_mpi):
        return place
    checks.warn_of_abort()
    server = None
    if place.meeting is not None and place.size > 1 and request.alone:
        server = starting.enter_context(steps.manager(place.meeting, request.end))
    else:
        starting.enter_context(attendance.Watch(max(request.end - time.monotonic(), 1.0)))
    rank, size = steps.start_mpi(server, place.size)
    claimed = place.rank, place.size
    if request.meets_over_mpi or place.store is None:
        # compare what the caller stated with MPI; the launcher's variables are checked below
        claimed = _merge((request.rank, request.size), stated(request.method))
    if request.own_world:
        return replace(place, rank=claimed[0], size=claimed[1])
    # without an MPI launcher a caller may ask for a world of one beside other processes
    if server is None and not (request.alone and claimed[1] == size):
        checks.check_launcher(size)
    problem = _contradiction(request, claimed, rank, size)
    return replace(place, rank=rank, size=size, problem=problem)


def _contradiction(request: _Request, claimed: tuple[int, int], rank: int, size: int) -> str:
    """Return how MPI contradicts the caller. The world has no spares, nor spares ranks."""
    active = size - request.spares if request.spares < size else size
    return checks.contradiction(claimed[0] if rank < active else -1, claimed[1], rank, active)


def _make(request: _Request, place: _Place) -> dict[str, Any]:
    """Make the world's backends."""
    options = BackendOptions(
        prefixed(place.store, "world"),
        place.rank,
        place.size,
        request.limit,
        request.name,
        device=cuda.device_index(request.device_id),
        end=request.end,
    )
    return create(request.config, options, request.options)


def _open(request: _Request, place: _Place, backends: dict[str, Any], tolerant: bool) -> None:
    """Make the default group from the backends, unless a rank has found a problem."""
    comm = combine(backends)
    problem = place.problem
    if request.own_world:
        problem = _contradiction(request, (place.rank, place.size), comm.rank, comm.size)
    try:
        steps.raise_together(comm, problem or spares.problem(backends, request.spares, tolerant))
    except (ValueError, DistError):
        comm.free()
        raise
    if comm.native is not None and not request.own_world:
        variables.export_place(comm.native, "init_process_group", request.spares)
    taken = None
    if request.spares:
        backends, taken = spares.divide(backends, request.spares, request.name)
        comm = combine(backends)
    _register(request, place, backends, comm)
    if taken is not None and _group.world.pg is not None:
        spares.admit(_group.world.pg, taken)
        return
    checks.log_start(comm)
    registry.log_substitute(request.asked, request.kind, comm.rank)
    if not request.named and request.kind == Backend.MPI and cuda.present():
        checks.warn_without_nccl(comm)
    if comm.local_rank == 0:
        checks.check_binding()
    if comm.size == 1:
        checks.warn_of_missing_launcher()


def _register(request: _Request, place: _Place, backends: dict[str, Any], comm: Carrier) -> None:
    """Register the default group."""
    if comm.native is not None:
        comm.native.count_from_here()  # errors tell the program's own collectives by their number
    wanted = repr(request.config)
    pg = ProcessGroup(backends, range(comm.size), request.name, "default_pg", request.kind, wanted)
    log.set_rank(comm.rank, comm.size)
    _group.add(pg)
    _group.world.store = place.store
    _group.world.device = cuda.device_index(request.device_id)
    _group.world.spares = request.spares


def _default_backend(device_id: Any) -> str:
    """Return the backend for a device, or for all that this installation serves."""
    if device_id is not None:
        return get_default_backend_for_device(
            f"cuda:{device_id}" if isinstance(device_id, int) else device_id
        )
    names = Backend.default_device_backend_map
    if cuda.present() and is_backend_available(names["cuda"]):
        return f"cpu:{names['cpu']},cuda:{names['cuda']}"
    return names["cpu"]


def _timeout(timeout: timedelta | None) -> timedelta:
    if timeout is None:
        return limit_of(config.get("timeout"))
    seconds_of(timeout)
    return timeout


def _merge(first: tuple[int, int], second: tuple[int, int]) -> tuple[int, int]:
    rank, size = (b if a == -1 else a for a, b in zip(first, second, strict=True))
    return rank, size
