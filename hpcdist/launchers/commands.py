"""The site's own launcher: which mpirun or srun belongs to this hpcdist, and what to tell it.

Importing this module needs neither torch nor MPI, and starts nothing.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcdist import _loader
from hpcdist.errors import DistBackendError
from hpcdist.hardware import allowed_cpus

__all__ = ["Starter", "beside_python", "cores", "find", "instead"]

_FAMILY = {"openmpi": "Open MPI", "mpich": "MPICH"}
#: Environment variables that ranks on other hosts need; Open MPI sends only what it is told to.
_SENT = re.compile(r"PATH|LD_LIBRARY_PATH|PYTHONPATH|VIRTUAL_ENV|(HPCDIST|OMP|TORCH|NCCL|UCX)_.*")


@dataclass(frozen=True)
class Starter:
    """A launcher and the options it understands.

    Parameters
    ----------
    kind : {"openmpi", "hydra", "srun"}
        Whose options it takes.
    path : str
        The program.
    plugin : str
        For srun: what its ``--mpi=`` has to be.
    """

    kind: str
    path: str
    plugin: str = ""

    def command(
        self,
        ranks: int,
        program: Sequence[str],
        hosts: Sequence[str] = (),
        *,
        bind: bool = True,
        label: bool = True,
        environ: Mapping[str, str] | None = None,
    ) -> list[str]:
        """Build the command line that starts a program.

        Parameters
        ----------
        ranks : int
            Number of processes.
        program : sequence of str
            What each runs.
        hosts : sequence of str
            Machines, each of which gets its share; by default this one, or those of the batch job.
        bind : bool
            Give each rank its share of the cores for its own, if it is two or more. Else the ranks
            share them, and OMP_NUM_THREADS is set unless it is.
        label : bool
            Put the rank in front of each line of output.
        environ : mapping, optional
            Read instead of ``os.environ``.

        Returns
        -------
        list of str
            The launcher, its options, and the program.
        """
        env = os.environ if environ is None else environ
        nodes = len(hosts) or (_nodes_of_job(env) if self.kind == "srun" else 1)
        here = -(-ranks // nodes)
        share = cores() // here if bind else 0
        # torch counts the cores it may use: unbound ranks would each start a thread for every core
        threads = max(1, cores() // here) if share < 2 and "OMP_NUM_THREADS" not in env else 0
        # On a core of its own a rank could not communicate while it computes.
        share = 0 if share < 2 else share
        options = getattr(self, "_" + self.kind)(ranks, here, share, hosts, label, env, threads)
        return [self.path, *options, *program]

    def _openmpi(
        self,
        ranks: int,
        here: int,
        share: int,
        hosts: Sequence[str],
        label: bool,
        env: Mapping[str, str],
        threads: int,
    ) -> list[str]:
        # It counts a core as a slot, and refuses more ranks than slots unless it is told.
        options = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        if hosts:
            options += ["--host", ",".join(f"{host}:{here}" for host in hosts)]
            for name in sorted(env):
                if _SENT.fullmatch(name) and name != "HPCDIST_STORE_KEY":
                    options += ["-x", name]
        if share:
            options += ["--map-by", f"ppr:{here}:node:PE={share}", "--bind-to", "core"]
        else:
            options += ["--map-by", f"ppr:{here}:node:OVERSUBSCRIBE", "--bind-to", "none"]
        options += ["-x", f"OMP_NUM_THREADS={threads}"] if threads else []
        options += ["--output", "tag"] if label else []
        return [*options, "-n", str(ranks)]

    def _hydra(
        self,
        ranks: int,
        here: int,
        share: int,
        hosts: Sequence[str],
        label: bool,
        env: Mapping[str, str],
        threads: int,
    ) -> list[str]:
        options = ["-hosts", ",".join(hosts), "-ppn", str(here)] if hosts else []
        options += ["-bind-to", f"core:{share}" if share else "none"]
        options += ["-genv", "OMP_NUM_THREADS", str(threads)] if threads else []
        options += ["-prepend-rank"] if label else []
        return [*options, "-n", str(ranks)]

    def _srun(
        self,
        ranks: int,
        here: int,
        share: int,
        hosts: Sequence[str],
        label: bool,
        env: Mapping[str, str],
        threads: int,
    ) -> list[str]:
        options = [f"--mpi={self.plugin}", f"--ntasks={ranks}"]
        if hosts:
            options += [f"--nodelist={','.join(hosts)}", f"--ntasks-per-node={here}"]
        per_task = env.get("SLURM_CPUS_PER_TASK", "")
        if share and per_task.isdecimal():  # srun does not take it over from sbatch
            options += [f"--cpus-per-task={per_task}", "--cpu-bind=cores"]
        elif not share:
            options += ["--overcommit", "--cpu-bind=none"]
        if threads:
            options += [f"--export=ALL,OMP_NUM_THREADS={threads}"]
        return [*options, *(["--label"] if label else [])]


def cores() -> int:
    """Cores that this process may use: hardware threads of one core count once.

    Returns
    -------
    int
        At least 1.
    """
    seen = set()
    for cpu in allowed_cpus():
        folder = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            package = (folder / "physical_package_id").read_text()
            seen.add((package, (folder / "core_id").read_text()))
        except OSError:
            seen.add(("", str(cpu)))
    return max(1, len(seen))


def family() -> str:
    """The MPI that hpcdist is built for: ``openmpi``, ``mpich``, or "" if it is not built."""
    return str(_loader.build_info().get("mpi_family", ""))


def beside_python() -> str | None:
    """The mpirun that came with the MPI in use: beside this Python, else beside the build's mpicc.

    Returns
    -------
    str or None
        Its path.
    """
    folders = [Path(sys.executable).parent]
    mpicc = _loader.build_info().get("mpicc") or ""
    if not _loader.build_info().get("mpi_wheel") and os.path.isabs(mpicc):
        folders.append(Path(mpicc).parent)
    for folder in folders:
        for name in ("mpirun", "mpiexec"):
            if os.access(folder / name, os.X_OK):
                return str(folder / name)
    return None


def find(choice: str = "auto", environ: Mapping[str, str] | None = None) -> Starter:
    """Find the launcher for this MPI.

    Parameters
    ----------
    choice : str
        ``auto``: srun inside a Slurm job whose srun has the right plugin, else mpirun. ``mpirun``
        or ``srun``: that one. A path: that program.
    environ : mapping, optional
        Read instead of ``os.environ``.

    Returns
    -------
    Starter
        It belongs to the MPI that hpcdist is built for.

    Raises
    ------
    DistBackendError
        If there is none, or it belongs to another MPI.
    """
    env = os.environ if environ is None else environ
    wanted = family()
    if choice in ("auto", "srun"):
        # inside a job step srun would start a step in the step
        inside = "SLURM_JOB_ID" in env and "SLURM_PROCID" not in env
        srun = shutil.which("srun", path=env.get("PATH")) if inside or choice == "srun" else None
        plugin = _plugin(srun, wanted) if srun else None
        if srun and plugin:
            return Starter("srun", srun, plugin)
        if choice == "srun":
            raise DistBackendError(
                f"srun has no MPI plugin for {_FAMILY.get(wanted, wanted)}"
                if srun
                else "there is no srun on PATH"
            )
    named = choice if choice not in ("auto", "mpirun") else ""
    path = shutil.which(named) if named else beside_python()
    path = path or (None if named else shutil.which("mpirun", path=env.get("PATH")))
    if not path:
        raise DistBackendError(
            f"{named or 'mpirun'} is not found: neither beside {sys.executable} nor on PATH. Load "
            f"the module of the {_FAMILY.get(wanted, 'MPI')} that hpcdist is built for, or name "
            "the program with --launcher"
        )
    kind = _kind(path)
    if kind != {"openmpi": "openmpi", "mpich": "hydra"}.get(wanted, kind):
        raise DistBackendError(
            f"{path} is {'Open MPI' if kind == 'openmpi' else 'hydra'}'s, but hpcdist is built for "
            f"{_FAMILY[wanted]}: its processes would be worlds of one. Put {_FAMILY[wanted]}'s "
            "mpirun first on PATH, or name it with --launcher"
        )
    return Starter(kind, path)


def _kind(path: str) -> str:
    """Whose options an mpirun takes, from what it says of itself."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DistBackendError(f"{path} --version does not work: {error}") from error
    text = (done.stdout + done.stderr).lower()
    if any(word in text for word in ("open mpi", "openrte", "prte")):
        return "openmpi"
    if any(word in text for word in ("hydra", "intel", "mpich", "mvapich")):
        return "hydra"
    raise DistBackendError(
        f"{path} is neither Open MPI's nor hydra's mpirun. It says of itself: {text.strip()[:200]}"
    )


def _plugin(srun: str, wanted: str) -> str | None:
    """The plugin by which this srun starts this MPI, if it has one."""
    try:
        done = subprocess.run([srun, "--mpi=list"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    there = set(re.findall(r"[\w]+", done.stdout + done.stderr))
    names = {"openmpi": ("pmix",), "mpich": ("cray_shasta", "pmi2")}.get(wanted, ())
    return next((name for name in names if name in there), None)


def _nodes_of_job(env: Mapping[str, str]) -> int:
    text = env.get("SLURM_JOB_NUM_NODES", "")
    return int(text) if text.isdecimal() and int(text) > 0 else 1


def instead(ranks: int) -> str:
    """The command that starts the program of this process under mpirun.

    Parameters
    ----------
    ranks : int
        Number of processes.

    Returns
    -------
    str
        To be pasted into a shell.
    """
    import multiprocessing

    python, *arguments = sys.orig_argv or [sys.executable, *sys.argv]
    if multiprocessing.parent_process() is not None:
        arguments = list(sys.argv)  # a child's own command line is multiprocessing's
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    path = beside_python() or "mpirun"
    return shlex.join([path, *root, "-n", str(ranks), python, *arguments])
