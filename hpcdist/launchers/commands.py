"""The site's own launcher: which mpirun or srun belongs to this hpcdist, and what to tell it.

Importing this module needs neither torch nor MPI, and starts nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcdist import _loader, config
from hpcdist.errors import DistBackendError
from hpcdist.hardware import allowed_cpus
from hpcdist.launchers import batch

#: Where Cray's systems have their software.
_CRAY = "/opt/cray"
_FAMILY = {"openmpi": "Open MPI", "mpich": "MPICH"}
#: Environment variables that ranks on other hosts need; Open MPI sends only what it is told to.
_SENT = re.compile(
    r"PATH|LD_LIBRARY_PATH|PYTHONPATH|VIRTUAL_ENV|(HPCDIST|MASTER|OMP|TORCH|NCCL|UCX)_.*"
)


@dataclass(frozen=True)
class Layout:
    """How the processes of a job are spread: what a launcher's options say.

    Attributes
    ----------
    ranks : int
        Number of processes.
    here : int
        Processes per node.
    share : int
        Cores that each rank gets for its own; 0: the ranks share them.
    threads : int
        OMP_NUM_THREADS for the ranks; 0: theirs is left as it is.
    hosts : sequence of str
        Machines; empty: this one, or those of the batch job.
    label : bool
        Put the rank in front of each line of output.
    environ : mapping
        The environment that the ranks inherit.
    """

    ranks: int
    here: int
    share: int
    threads: int
    hosts: Sequence[str]
    label: bool
    environ: Mapping[str, str]


@dataclass(frozen=True)
class Starter:
    """A launcher, and the options that it understands.

    Parameters
    ----------
    path : str
        The program.
    """

    path: str

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
        here = -(-ranks // (len(hosts) or self.nodes(env)))
        share = cores() // here if bind else 0
        # torch counts the cores it may use: unbound ranks would each start a thread for every core
        threads = max(1, cores() // here) if share < 2 and "OMP_NUM_THREADS" not in env else 0
        # On a core of its own a rank could not communicate while it computes.
        share = 0 if share < 2 else share
        layout = Layout(ranks, here, share, threads, hosts, label, env)
        return [self.path, *self.options(layout), *program]

    def nodes(self, environ: Mapping[str, str]) -> int:
        """Number of nodes that the ranks are spread over where no hosts are named."""
        return batch.nodes(environ)[0]

    def options(self, layout: Layout) -> list[str]:
        """The launcher's options for a layout."""
        raise NotImplementedError


class OpenMpi(Starter):
    """Open MPI's mpirun."""

    def options(self, layout: Layout) -> list[str]:
        """It counts a core as a slot, and refuses more ranks than slots unless it is told."""
        options = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        options += ["--with-ft", "ulfm"] if config.get("ft", layout.environ) else []
        here = layout.here
        if layout.hosts:
            options += ["--host", ",".join(f"{host}:{here}" for host in layout.hosts)]
        if layout.hosts or self.nodes(layout.environ) > 1:
            for name in sorted(layout.environ):
                if _SENT.fullmatch(name) and name != "HPCDIST_STORE_KEY":
                    options += ["-x", name]
        if layout.share:
            options += ["--map-by", f"ppr:{here}:node:PE={layout.share}", "--bind-to", "core"]
        else:
            options += ["--map-by", f"ppr:{here}:node:OVERSUBSCRIBE", "--bind-to", "none"]
        options += ["-x", f"OMP_NUM_THREADS={layout.threads}"] if layout.threads else []
        options += ["--output", "tag"] if layout.label else []
        return [*options, "-n", str(layout.ranks)]


def files_in(folder: Path) -> dict[str, str]:
    """Variables with which Open MPI's mpirun has its files in a folder, which must exist.

    By default they are in ``ompi.PID``, which an mpirun that was killed leaves behind. One that
    gets the same pid later ends there: "The PMIx server's listener thread failed to start".
    """
    return {"PRTE_MCA_prte_local_tmpdir_base": str(folder)}


def files_apart(pid: int, environ: Mapping[str, str]) -> dict[str, str]:
    """The same for an mpirun with this pid, if the files of an earlier one are in its way."""
    base = Path(tempfile.gettempdir())
    if not (base / f"ompi.{pid}").exists() or any("_tmpdir_base" in name for name in environ):
        return {}
    folder = base / f"hpcdist-ompi-{os.getuid()}"  # stays: nobody is left to remove it
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    seen = folder.lstat()
    safe = stat.S_ISDIR(seen.st_mode) and seen.st_uid == os.getuid()
    return files_in(folder) if safe else {}


class Hydra(Starter):
    """The mpirun of MPICH and its derivatives."""

    def options(self, layout: Layout) -> list[str]:
        """Hydra binds to cores by number, and sends the whole environment."""
        options = []
        if layout.hosts:
            options += ["-hosts", ",".join(layout.hosts)]
        if layout.hosts or self.nodes(layout.environ) > 1:
            options += ["-ppn", str(layout.here)]
        options += ["-bind-to", f"core:{layout.share}" if layout.share else "none"]
        options += ["-genv", "OMP_NUM_THREADS", str(layout.threads)] if layout.threads else []
        options += ["-prepend-rank"] if layout.label else []
        return [*options, "-n", str(layout.ranks)]


class IntelMpi(Hydra):
    """Intel MPI's mpirun, a hydra with another way to bind."""

    def options(self, layout: Layout) -> list[str]:
        """It ignores -bind-to, and by itself divides the cores among the ranks of a node."""
        options = super().options(layout)
        where = options.index("-bind-to")
        binding = ["I_MPI_PIN_DOMAIN", "auto"] if layout.share else ["I_MPI_PIN", "off"]
        return [*options[:where], "-genv", *binding, *options[where + 2 :]]


@dataclass(frozen=True)
class Srun(Starter):
    """Slurm's srun.

    Parameters
    ----------
    path : str
        The program.
    plugin : str
        What its ``--mpi=`` has to be for this MPI.
    """

    plugin: str

    def nodes(self, environ: Mapping[str, str]) -> int:
        """Nodes of the batch job."""
        text = environ.get("SLURM_JOB_NUM_NODES", "")
        return int(text) if text.isdecimal() and int(text) > 0 else 1

    def options(self, layout: Layout) -> list[str]:
        """Cores are named per task, as sbatch got them."""
        options = [f"--mpi={self.plugin}", f"--ntasks={layout.ranks}"]
        if layout.hosts:
            hosts = ",".join(layout.hosts)
            # else it takes as many nodes as the batch job has, spare and dead ones too
            options += [f"--nodes={len(layout.hosts)}", f"--nodelist={hosts}"]
            options += [f"--ntasks-per-node={layout.here}"]
        per_task = layout.environ.get("SLURM_CPUS_PER_TASK", "")
        if layout.share and per_task.isdecimal():  # srun does not take it over from sbatch
            options += [f"--cpus-per-task={per_task}", "--cpu-bind=cores"]
        elif not layout.share:
            options += ["--overcommit", "--cpu-bind=none"]
        if layout.threads:
            options += [f"--export=ALL,OMP_NUM_THREADS={layout.threads}"]
        return [*options, *(["--label"] if layout.label else [])]


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
        # Intel's mpirun is a script that looks for this on PATH.
        hydra = (folder / "mpiexec.hydra").exists() and not shutil.which("mpiexec.hydra")
        for name in ("mpiexec.hydra",) if hydra else ("mpirun", "mpiexec"):
            if os.access(folder / name, os.X_OK):
                return str(folder / name)
    return None


def find(choice: str = "auto", environ: Mapping[str, str] | None = None) -> Starter:
    """Find the launcher for this MPI.

    Parameters
    ----------
    choice : str
        ``auto``: srun in salloc's shell if it has the right plugin, else mpirun. ``mpirun``
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
        # Inside a job step srun would start a step in the step. A batch script has the variable as
        # well: there mpirun starts also what does not fit into the tasks that sbatch was told.
        inside = "SLURM_JOB_ID" in env and "SLURM_PROCID" not in env
        srun = shutil.which("srun", path=env.get("PATH")) if inside or choice == "srun" else None
        plugin = _plugin(srun, wanted) if srun else None
        if srun and plugin:
            return Srun(srun, plugin)
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
    if not issubclass(kind, {"openmpi": OpenMpi, "mpich": Hydra}.get(wanted, Starter)):
        raise DistBackendError(
            f"{path} is {'Open MPI' if kind is OpenMpi else 'hydra'}'s, but hpcdist is built for "
            f"{_FAMILY[wanted]}: its processes would be worlds of one. Put {_FAMILY[wanted]}'s "
            "mpirun first on PATH, or name it with --launcher"
        )
    return kind(path)


def _kind(path: str) -> type[Starter]:
    """Whose options an mpirun takes, from what it says of itself."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DistBackendError(f"{path} --version does not work: {error}") from error
    text = (done.stdout + done.stderr).lower()
    if any(word in text for word in ("open mpi", "openrte", "prte")):
        return OpenMpi
    if "intel(r) mpi" in text:
        return IntelMpi
    if any(word in text for word in ("hydra", "mpich", "mvapich")):
        return Hydra
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
    # Slurm's packages contain Cray's plugin everywhere; elsewhere each rank would be alone with it.
    mpich = ("cray_shasta", "pmi2") if os.path.isdir(_CRAY) else ("pmi2",)
    names = {"openmpi": ("pmix",), "mpich": mpich}.get(wanted, ())
    return next((name for name in names if name in there), None)


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
