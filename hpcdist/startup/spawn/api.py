"""``spawn``: start the processes, through the site's launcher or directly."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import spawn as mp_spawn
from pathlib import Path
from typing import Any

from hpcdist import _engine, config, launchers
from hpcdist.errors import DistBackendError
from hpcdist.launchers import batch, commands, lines, variables
from hpcdist.startup.variables import free_port

from . import child
from .context import ProcessContext

# Program of each process: it sets this process's sys.path and calls the package.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.load(open(sys.argv[1] + '/path')); "
    "from hpcdist.startup.spawn.child import main; main()"
)
#: Prefixes of the variables that an outer launcher sets for its processes.
_OUTER = ("OMPI_COMM_", "PMIX_", "PMI_", "PRTE_", "MPI_LOCAL", "TORCHELASTIC_", "MASTER_", "HYDI_")
_OUTER_NAMES = frozenset({*variables.PLACE, variables.EXPORTED, "GROUP_RANK", "ROLE_RANK"})


def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> ProcessContext | None:
    """Run a function on several ranks of this machine.

    Each rank calls ``fn(rank, *args)`` in a process of its own, in which
    :func:`hpcdist.init_process_group` needs no arguments. The mpirun that belongs to this MPI, or
    srun, starts the processes; MPICH needs neither. Each line of output is prefixed with the rank.

    Local to this process, which must not be one of an MPI job.

    Parameters
    ----------
    fn : callable
        A function of a module, or of the program itself if that is guarded by ``if __name__ ==
        "__main__"``.
    args : sequence
        Further arguments; they and `fn` have to be picklable. They travel in a file that only this
        user can read.
    nprocs : int
        Number of ranks.
    join : bool
        Wait until all processes have ended. Otherwise call ``join()`` of the result.
    daemon : bool
        Accepted for compatibility with torch: the processes never outlive this one.
    start_method : str
        Accepted for compatibility with torch; the processes are always started afresh.

    Returns
    -------
    ProcessContext or None
        None if `join`.

    Raises
    ------
    ValueError
        If `nprocs` is less than 1.
    DistBackendError
        If there is no launcher and this MPI needs one, or this process is in an MPI job already.
    hpcdist.startup.spawn.ProcessRaisedException
        If the function raised on a rank; the others are ended. Its traceback is in the message.
    hpcdist.startup.spawn.ProcessExitedException
        If a rank ended with an exit status or by a signal.

    Notes
    -----
    Source: ``torch.multiprocessing.spawn``.
    """
    if child.importing:
        raise RuntimeError(
            "hpcdist.spawn was called while a spawned process imported the main module. Guard the "
            'program\'s own part by: if __name__ == "__main__":'
        )
    if start_method != "spawn":
        warnings.warn(f"start_method={start_method!r} is ignored", stacklevel=2)
    if nprocs < 1:
        raise ValueError(f"nprocs must be at least 1, not {nprocs}")
    launch = launchers.detect()
    if launchers.starts_mpi() and launch is not None and (launch.size or 2) > 1:
        raise DistBackendError(
            f"hpcdist.spawn was called by one of the processes that {launch.launcher} started; "
            "start a program that spawns by itself, with plain python"
        )
    starter = _starter()
    folder = Path(tempfile.mkdtemp(prefix="hpcdist-spawn-"))  # 0700
    try:
        _write(folder, fn, args)
        context = _start(starter, folder, nprocs)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if not join:
        return context
    context.join()
    return None


def _starter() -> commands.Starter | None:
    """Return the launcher; None where MPICH's processes can be started without one."""
    try:
        return commands.find("mpirun" if _beside_its_job(os.environ) else "auto")
    except DistBackendError:
        if launchers.mpi_family(_engine.library_version()) == "Open MPI":
            raise
        return None


def _write(folder: Path, fn: Callable[..., Any], args: Sequence[Any]) -> None:
    preparation = mp_spawn.get_preparation_data("hpcdist.spawn")
    # a key of multiprocessing's connections, which can be sent only through them
    preparation.pop("authkey", None)
    call = pickle.dumps((fn, tuple(args)))
    (folder / "job").write_bytes(pickle.dumps({"preparation": preparation, "call": call}))
    (folder / "path").write_text(json.dumps(sys.path))


def _start(starter: commands.Starter | None, folder: Path, nprocs: int) -> ProcessContext:
    program = [sys.executable, "-c", _PROGRAM, str(folder)]
    env = {name: value for name, value in os.environ.items() if not _is_outer(name)}
    if _beside_its_job(env):
        env = {name: value for name, value in env.items() if not name.startswith("SLURM_")}
    variables.export({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}, env)
    if starter is not None:
        if isinstance(starter, commands.Srun):
            env["SLURM_NNODES"] = "1"
        if isinstance(starter, commands.Hydra):
            lines.ask_for(env)
        if isinstance(starter, commands.OpenMpi):
            env.update(commands.files_in(folder))  # spawn's own, also in a rank of another one
        command = starter.command(nprocs, program, environ=_one_node(env))
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL)
        blind = isinstance(starter, commands.OpenMpi) and bool(config.get("ft", env))
        return ProcessContext([process], folder, nprocs, blind)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(nprocs):
            processes.append(
                subprocess.Popen(
                    [*program, str(rank), str(nprocs)],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
            )
    except BaseException:
        for process in processes:
            process.kill()
        raise
    return ProcessContext(processes, folder, nprocs)


def _one_node(env: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in env.items() if name not in batch.LISTS}
    return {**kept, "SLURM_JOB_NUM_NODES": "1"}


def _beside_its_job(env: Mapping[str, str]) -> bool:
    """Whether this is salloc's shell on a login node: srun and mpirun would start elsewhere."""
    return "SLURM_JOB_ID" in env and not ("SLURMD_NODENAME" in env or "SLURM_PROCID" in env)


def _is_outer(name: str) -> bool:
    return name.startswith(_OUTER) or name in _OUTER_NAMES
