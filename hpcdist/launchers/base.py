"""What is known of a launcher, and a process's place in the job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Environ = Mapping[str, str]


@dataclass(frozen=True)
class Launch:
    """A process's place in its job, from its launcher's environment variables.

    Parameters
    ----------
    launcher : str
        Name of the launcher, for messages.
    rank : int or None
        Rank in the job; None if the launcher does not set it.
    size : int or None
        Number of processes in the job; None if the launcher does not set it.
    local_rank : int or None
        Rank among the processes of this node.
    local_size : int or None
        Number of processes on this node.
    nodes : int or None
        Number of nodes that the job's processes are on.
    """

    launcher: str
    rank: int | None
    size: int | None
    local_rank: int | None
    local_size: int | None
    nodes: int | None = None


@dataclass(frozen=True)
class Launcher:
    """A launcher by the names of its environment variables, and how to read them.

    A subclass overrides a method where a variable is not a plain number.

    Parameters
    ----------
    name : str
        Its name, for messages.
    present : tuple of str
        Variables that are all set if it started the process.
    rank, size, local_rank, local_size, nodes : str
        The variables of :class:`Launch`; empty where it sets none.
    mpi : bool
        Whether its processes are one MPI job.
    over_pmi_fd : bool
        Whether its processes reach it through the descriptor that is in PMI_FD, if that is set.
    """

    name: str
    present: tuple[str, ...]
    rank: str
    size: str = ""
    local_rank: str = ""
    local_size: str = ""
    nodes: str = ""
    mpi: bool = True
    over_pmi_fd: bool = False

    def detect(self, env: Environ) -> bool:
        """Return whether this launcher started the process.

        Parameters
        ----------
        env : mapping
            The environment.

        Returns
        -------
        bool
            True if all of its variables are set.
        """
        return all(variable in env for variable in self.present)

    def read(self, env: Environ) -> Launch:
        """Read the process's place in the job.

        Parameters
        ----------
        env : mapping
            The environment.

        Returns
        -------
        Launch
            Ranks and sizes; None for what the launcher does not set.

        Raises
        ------
        ValueError
            If a variable is set and is not a whole number.
        """
        size, local_size = self.number(env, self.size), self.processes_here(env)
        nodes = self.number(env, self.nodes)
        if nodes is None and size is not None and size == local_size:
            nodes = 1  # all processes are on this node; otherwise MPI determines the number
        return Launch(
            self.name,
            self.number(env, self.rank),
            size,
            self.number(env, self.local_rank),
            local_size,
            nodes,
        )

    def processes_here(self, env: Environ) -> int | None:
        """Return the number of processes on the node, or None if the launcher does not set it."""
        return self.number(env, self.local_size)

    def fix(self, library: str) -> str:
        """Return advice for a job where MPI sees one process although the launcher started more.

        Parameters
        ----------
        library : str
            Version text of the MPI library in use.

        Returns
        -------
        str
            One or two sentences with the command.
        """
        wanted = mpi_family(library)
        return (
            f"hpcdist runs on {wanted} here, and {self.name} did not start {wanted}'s processes. "
            f"Start the job with the mpirun that belongs to {wanted}."
        )

    def number(self, env: Environ, variable: str) -> int | None:
        """Read a variable as a whole number; None if it is not set."""
        text = env.get(variable, "") if variable else ""
        if not text.strip():
            return None
        try:
            return int(text)
        except ValueError:
            raise ValueError(
                f"{variable}={text!r}, which {self.name} sets, is not a whole number"
            ) from None


def mpi_family(library: str) -> str:
    """Name the MPI implementation from its version text.

    Parameters
    ----------
    library : str
        What ``MPI_Get_library_version`` returns.

    Returns
    -------
    str
        ``"Open MPI"``, ``"Intel MPI"``, ``"MVAPICH"``, ``"Cray MPICH"``, ``"MPICH"``, or
        ``"this MPI"`` when the text is none of those.
    """
    text = library.lower()
    # MPICH last: its derivatives' texts contain its name too
    for mark, family in (
        ("open mpi", "Open MPI"),
        ("intel", "Intel MPI"),
        ("mvapich", "MVAPICH"),
        ("cray", "Cray MPICH"),
        ("mpich", "MPICH"),
    ):
        if mark in text:
            return family
    return "this MPI"
