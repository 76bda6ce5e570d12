"""Checks around a start: the launcher, what the caller stated, the cores."""

from __future__ import annotations

import os

from hpcdist import _engine, _nccl_loader, config, debug_level, hardware, launchers, log
from hpcdist.backends.carrier import Carrier
from hpcdist.errors import DistBackendError
from hpcdist.launchers import commands
from hpcdist.launchers.slurm import unused_tasks
from hpcdist.launchers.table import OPEN_MPI, PMIX, SLURM_PMIX

_log = log.get_logger("world")


def warn_of_abort() -> None:
    """MPICH without PMIx stops the process in MPI_Init if it finds PMIx: print why beforehand."""
    launcher = launchers.find()
    library = _engine.library_version()
    if (
        launcher in (OPEN_MPI, SLURM_PMIX, PMIX)
        and _engine.mpi_state() == "none"
        and launchers.mpi_family(library) == "MPICH"
        and "pmix" not in library.lower()  # among its configure options
    ):
        # on every rank: the first one that stops ends the others
        _log.warning(
            "this MPICH was built without PMIx, by which %s speaks to it: if it stops here with "
            "'unsupported PMI version', that is why. %s",
            launcher.name,
            launcher.fix(library),
        )


def check_launcher(size: int) -> None:
    """Raise if the launcher started several processes and MPI sees one."""
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


def contradiction(rank: int, size: int, true_rank: int, true_size: int) -> str:
    """Return how MPI contradicts the caller. Programs for torch's MPI pass 0 and 0."""
    if (size > 0 and size != true_size) or (rank >= 0 and size != 0 and rank != true_rank):
        return (
            f"init_process_group was told rank={rank}, world_size={size}, but this is rank "
            f"{true_rank} of {true_size}. Omit both, and start with: mpirun -n "
            f"{size if size > 0 else 'N'} python ..."
        )
    return ""


def log_start(comm: Carrier) -> None:
    """Log once per job what it runs on: the first lines that a bug report needs."""
    if comm.rank == 0:
        for variable, near in config.unread().items():
            _log.warning("nothing reads %s%s", variable, f": is {near} meant?" if near else "")
        _log.info(
            "%s; debug level %s",
            _engine.library_version().partition("\n")[0],
            debug_level.get_debug_level().name,
        )
    for item in config.describe():
        if item["is_set"]:
            _log.debug("%s=%s", item["variable"], item["value"])


def check_binding() -> None:
    """Warn once per node if a rank has one core for all its threads."""
    family = launchers.mpi_family(_engine.library_version())
    advice = hardware.binding_advice(family, hardware.allowed_cpus(), os.cpu_count() or 1)
    if advice is not None:
        _log.warning(advice)


def warn_of_missing_launcher() -> None:
    """Warn if this world of one runs in a Slurm job of several tasks that srun did not start."""
    tasks = unused_tasks(os.environ) if launchers.find() is None else 0
    if tasks:
        _log.warning(
            "this process is a world of one, and the Slurm job has %d tasks: without srun or "
            "mpirun only one process starts. If all were meant, start them with: %s",
            tasks,
            commands.instead(tasks),
        )


def report_fault_tolerance(comm: Carrier) -> None:
    """Log once per job why it ends when a rank dies, although HPCDIST_FT says otherwise."""
    if comm.rank:
        return
    if comm.native is None:
        why = "the group is not over MPI"
    elif _engine.tolerates_failures(comm.native):
        return
    else:
        why = _engine.missing_fault_tolerance()
    _log.warning(
        "HPCDIST_FT (or enable_reconfigure) is set, but a rank that dies will end this job: %s",
        why,
    )


def warn_without_nccl(comm: Carrier) -> None:
    """Log once per job that CUDA tensors go through the host, and why."""
    if comm.rank:
        return
    try:
        _nccl_loader.load()
    except DistBackendError as error:
        _log.warning(
            "CUDA tensors go over MPI, through pinned host memory where MPI does not take them as "
            "they are: %s. Pass backend='mpi' to silence this warning.",
            error,
        )
