"""Starting and ending: the default group, and what may be asked about this installation."""

from __future__ import annotations

import contextlib
import os
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from hpcdist import _engine, _nccl_loader, config, debug_level, hardware, launchers, log
from hpcdist.backends import cuda, mpi
from hpcdist.backends.base import BackendOptions
from hpcdist.backends.create import create
from hpcdist.backends.registry import Backend, BackendConfig
from hpcdist.errors import DistBackendError, DistError
from hpcdist.groups import state as _group
from hpcdist.groups.queries import get_default_backend_for_device, is_backend_available
from hpcdist.groups.state import GroupMember, ProcessGroup
from hpcdist.launchers.generic import Pmix
from hpcdist.launchers.openmpi import OpenMpi
from hpcdist.launchers.slurm import SlurmPmix
from hpcdist.startup import attendance, steps
from hpcdist.startup.rendezvous import rendezvous
from hpcdist.startup.rendezvous.urls import stated
from hpcdist.store.prefix import prefixed

if TYPE_CHECKING:
    import torch

__all__ = ["destroy_process_group", "init_process_group"]

_log = log.get_logger("world")


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
) -> None:
    """Make the default group, of all processes of the job.

    All processes must call it. Under mpirun, srun or torchrun nothing needs to be given; without a
    launcher the process is a world of one. Processes that no MPI launcher started become one MPI
    job through their store, with MPICH and its derivatives; Open MPI cannot, and the error has the
    mpirun command.

    Parameters
    ----------
    backend : str, optional
        ``"mpi"``, ``"cpu:mpi,cuda:nccl"`` or the name of a registered backend. None means the
        default backend of `device_id`'s type; without that MPI, and NCCL for CUDA tensors where
        torch can use a GPU and there is a libnccl.so.2. Without that library MPI moves them too.
    init_method : str, optional
        URL that says how the processes meet: ``"mpi://"``, ``"env://"``,
        ``"tcp://host:port?rank=&world_size="``, ``"file:///path?rank=&world_size="`` or of a scheme
        that was registered. None means ``"mpi://"``, and ``"env://"`` under torchrun or where a
        script has set RANK, WORLD_SIZE and MASTER_ADDR without an MPI launcher.
    timeout : datetime.timedelta, optional
        After this long a missing peer is an error. None means the setting ``HPCDIST_TIMEOUT``, 30
        minutes by default.
    world_size : int
        Number of processes; -1 means "as the launcher or the URL says". Under an MPI launcher
        only compared with MPI's.
    rank : int
        This process's rank; -1 means "as the launcher or the URL says". Under an MPI launcher only
        compared with MPI's.
    store : object, optional
        Key-value store shared by the processes, in place of `init_method`, with `rank` and
        `world_size`: an :class:`hpcdist.Store` or one of torch's.
    group_name : str
        Name of the group in messages; empty means ``"world"``.
    pg_options : object, optional
        Options of the backend: :class:`hpcdist.MPIOptions`, for example with a communicator of
        mpi4py as the world.
    device_id : torch.device, int or str, optional
        Device this process works on; an int is the index of a CUDA device. Over NCCL the
        communicator is then made now, and not at the first operation; all ranks must give one, or
        none.

    Raises
    ------
    ValueError
        If the default group exists already, or the arguments contradict each other or MPI, or the
        URL says too little.
    TypeError
        If an argument is of the wrong type.
    DistNetworkError
        If nobody knows the init method, or the store cannot be reached.
    DistBackendError
        If the backend cannot be had here, or the launcher started several processes and MPI sees
        one: then the message names the right launcher or srun plugin.
    DistMismatchError
        On all ranks that came, if two are the same rank, or they disagree on the world size or the
        backend.
    DistTimeoutError
        On all ranks that came, if others do not come within the timeout; it names those of this
        node. Where MPI waits for them while it starts, nothing can be raised, and the job ends with
        the same words.

    Notes
    -----
    Source: ``torch.distributed.init_process_group``.
    """
    if _group.is_initialized():
        raise ValueError(
            "the default process group exists already: call hpcdist.destroy_process_group() before "
            "another init_process_group()"
        )
    if store is not None and init_method is not None:
        raise ValueError("give either init_method or store, not both")
    log.configure(debug_level.log_level())
    kind = Backend(backend) if backend is not None else _default_backend(device_id)
    wanted = BackendConfig(kind)
    limit = _timeout(timeout)
    end = time.monotonic() + limit.total_seconds()
    needs_mpi = Backend.MPI in wanted.get_device_backend_map().values()
    alone = needs_mpi and steps.alone()
    if store is None:
        method = init_method or steps.default_method(needs_mpi)
        if alone:
            steps.refuse_without_launcher(steps.expected_size(method, world_size))
        store, met_rank, met_size = next(rendezvous(method, rank, world_size, timeout=limit))
        over_mpi = urlsplit(method).scheme == "mpi"
    else:
        method, met_rank, met_size, over_mpi = "the given store", rank, world_size, False
        if world_size <= 0 or rank < 0:
            raise ValueError(
                f"a store needs rank and world_size too: got rank={rank}, world_size={world_size}"
            )
        if alone:
            steps.refuse_without_launcher(world_size)
    meeting = None
    if store is not None:
        meeting = steps.meet(store, met_rank, met_size, limit, method, repr(wanted))
        store = prefixed(meeting.store, meeting.name)  # unlike that of any other start
    own_world = isinstance(pg_options, mpi.MPIOptions) and pg_options.comm is not None
    problem = ""
    with contextlib.ExitStack() as starting:
        if over_mpi or needs_mpi:
            _warn_of_abort()
            server = None
            if meeting is not None and met_size > 1 and alone:
                server = starting.enter_context(steps.manager(meeting, end))
            else:
                starting.enter_context(attendance.Watch(max(end - time.monotonic(), 1.0)))
            rank_of_mpi, size_of_mpi = steps.start_mpi(server, met_size)
            if over_mpi or store is None:
                # what the caller stated is compared with MPI; a launcher's word is looked at below
                met_rank, met_size = _merge((rank, world_size), stated(method))
            if not own_world:
                if server is None:
                    _check_launcher(size_of_mpi)
                problem = _contradiction(met_rank, met_size, rank_of_mpi, size_of_mpi)
                met_rank, met_size = rank_of_mpi, size_of_mpi
        name = group_name or "world"
        about = BackendOptions(
            prefixed(store, "world"),
            met_rank,
            met_size,
            limit,
            name,
            device=cuda.device_index(device_id),
            end=end,
        )
        backends = create(wanted, about, pg_options)
    comm = next(iter(backends.values()))
    if own_world:
        problem = _contradiction(met_rank, met_size, comm.rank, comm.size)
    try:
        steps.raise_together(comm, problem)
    except (ValueError, DistError):
        comm.free()
        raise
    pg = ProcessGroup(backends, range(comm.size), name, "default_pg", kind, repr(wanted))
    log.set_rank(comm.rank, comm.size)
    _group.add(pg)
    _group.world.store = store
    _log_start(comm)
    if backend is None and kind == Backend.MPI and cuda.present():
        _warn_without_nccl(comm)
    if comm.local_rank == 0:
        _check_binding()


def destroy_process_group(group: ProcessGroup | None = None) -> None:
    """Free a group, or all groups.

    All members must call it. It waits for outstanding operations, of all groups together for the
    group's timeout or 30 seconds, whichever is shorter; where nothing but receives is left whose
    messages do not come, for three seconds, and then takes those back. And it waits up to a second
    for the other members: where they do not come, or a message was sent that nobody received, MPI's
    communicator is kept, because MPI would take what is still on its way for messages of the next
    group. MPI itself stays up, so that :func:`init_process_group` may be called again.

    Parameters
    ----------
    group : ProcessGroup, optional
        None or the default group frees all groups.

    Raises
    ------
    ValueError
        If there is no default group, or the group was destroyed already.
    DistTimeoutError
        If an operation is still outstanding then. The group is gone all the same; the operation
        keeps its tensors.
    DistError
        What went wrong in flight over NCCL, if no call has raised it yet.

    Notes
    -----
    Source: ``torch.distributed.destroy_process_group``.
    """
    if group is GroupMember.NON_GROUP_MEMBER:
        return
    pg = _group.member(group)
    if pg is not _group.world.pg:
        _group.remove(pg)
        return
    for each in _group.world.groups:
        _group.leave_handler(each)
    problem: BaseException | None = None
    end = time.monotonic() + min(pg._comm.timeout, _group.DRAIN)
    # the youngest first: members made their groups in the same order, so they free them in the same
    for each in reversed(list(_group.world.groups)):
        try:
            _group.remove(each, end if _group.waits_on(problem) else 0.0)
        except BaseException as error:  # the others must be freed all the same, after Ctrl-C too
            problem = problem or error
    _group.world.forget()
    log.set_rank(None)
    if problem is not None:
        raise problem


def _default_backend(device_id: Any) -> str:
    """The backend for a device, or for all that this installation serves."""
    if device_id is not None:
        return get_default_backend_for_device(
            f"cuda:{device_id}" if isinstance(device_id, int) else device_id
        )
    names = Backend.default_device_backend_map
    if cuda.present() and is_backend_available(names["cuda"]):
        return f"cpu:{names['cpu']},cuda:{names['cuda']}"
    return names["cpu"]


def _warn_without_nccl(comm: Any) -> None:
    """Say once a job that CUDA tensors take the way through the host, and why."""
    if comm.rank:
        return
    try:
        _nccl_loader.load()
    except DistBackendError as error:
        _log.warning(
            "CUDA tensors go over MPI, through pinned host memory where MPI does not take them as "
            "they are: %s. backend='mpi' says that it is meant so.",
            error,
        )


def _timeout(timeout: timedelta | None) -> timedelta:
    if timeout is None:
        return timedelta(seconds=config.get("timeout"))
    if not isinstance(timeout, timedelta):
        raise TypeError(f"timeout must be a datetime.timedelta, not {timeout!r}")
    if timeout <= timedelta(0):
        raise ValueError(f"timeout must be positive, not {timeout}")
    return timeout


def _merge(first: tuple[int, int], second: tuple[int, int]) -> tuple[int, int]:
    rank, size = (b if a == -1 else a for a, b in zip(first, second, strict=True))
    return rank, size


def _warn_of_abort() -> None:
    """MPICH without PMIx stops the process in MPI_Init where it finds PMIx: say why beforehand."""
    launcher = launchers.find()
    library = _engine.library_version()
    if (
        isinstance(launcher, (OpenMpi, SlurmPmix, Pmix))
        and _engine.mpi_state() == "none"
        and launchers.mpi_family(library) == "MPICH"
        and "pmix" not in library.lower()  # of its configure options
    ):
        # on every rank: the first that stops takes the others with it
        _log.warning(
            "this MPICH was built without PMIx, by which %s speaks to it: if it stops here with "
            "'unsupported PMI version', that is why. %s",
            launcher.name,
            launcher.fix(library),
        )


def _check_launcher(size: int) -> None:
    """A launcher with several processes, and an MPI with one: the start went wrong."""
    launcher = launchers.find()
    launch = launchers.detect()
    if size > 1 or launcher is None or launch is None or (launch.size or 1) <= 1:
        return
    library = _engine.library_version()
    raise DistBackendError(
        f"{launch.launcher} started {launch.size} processes (this is rank {launch.rank}), but "
        f"{launchers.mpi_family(library)} sees one: each would be a world of its own. "
        + launcher.fix(library)
    )


def _contradiction(rank: int, size: int, true_rank: int, true_size: int) -> str:
    """What is wrong with what the caller stated. Programs for torch's MPI pass 0 and 0."""
    if (size > 0 and size != true_size) or (rank >= 0 and size != 0 and rank != true_rank):
        return (
            f"init_process_group was told rank={rank}, world_size={size}, but this is rank "
            f"{true_rank} of {true_size}. Leave both out, and start with: mpirun -n "
            f"{size if size > 0 else 'N'} python ..."
        )
    return ""


def _log_start(comm: Any) -> None:
    """Say once a job what it runs on: the first lines that a bug report needs."""
    if comm.rank == 0:
        _log.info(
            "%s; debug level %s",
            _engine.library_version().partition("\n")[0],
            debug_level.get_debug_level().name,
        )
    for item in config.describe():
        if item["is_set"]:
            _log.debug("%s=%s", item["variable"], item["value"])


def _check_binding() -> None:
    """Once a node: say so when a rank has one core for all its threads."""
    family = launchers.mpi_family(_engine.library_version())
    advice = hardware.binding_advice(family, hardware.allowed_cpus(), os.cpu_count() or 1)
    if advice is not None:
        _log.warning(advice)
