"""Rank and size before MPI is up: the environment variables of each launcher.

The order matters, because launchers nest: torchrun inside srun, mpirun inside sbatch. After MPI has
started, MPI's values count, and these serve only to detect a wrong start. Importing this package
needs neither torch nor MPI.
"""

from __future__ import annotations

import os
import stat

from . import lines, variables
from .base import Environ, Launch, Launcher, mpi_family
from .table import ENVIRONMENT, HYDRA, ORDER

__all__ = [
    "ENVIRONMENT",
    "HYDRA",
    "Launch",
    "Launcher",
    "detect",
    "find",
    "lines",
    "mpi_family",
    "of_an_ancestor",
    "own_variables",
    "starts_mpi",
    "variables",
]


def find(env: Environ | None = None) -> Launcher | None:
    """Find the launcher that started this process.

    Parameters
    ----------
    env : mapping, optional
        Read instead of ``os.environ``.

    Returns
    -------
    Launcher or None
        None if no launcher's variables are set, or only those of an ancestor of this process.
    """
    environ = own_variables(os.environ) if env is None else env
    for launcher in ORDER:
        if launcher.detect(environ) and not (
            env is None and launcher.over_pmi_fd and of_an_ancestor(environ)
        ):
            return launcher
    return None


def of_an_ancestor(environ: Environ) -> bool:
    """Return whether the PMI variables were inherited from a process that a launcher started.

    A process that such a process starts gets its variables, but as a rule not the connection to the
    launcher, whose descriptor is in PMI_FD. MPI would end the process.

    Parameters
    ----------
    environ : mapping
        This process's environment.
    """
    text = environ.get("PMI_FD", "")
    if not text.isdecimal():
        return False
    try:
        return not stat.S_ISSOCK(os.fstat(int(text)).st_mode)
    except OSError:
        return True


def own_variables(environ: Environ) -> dict[str, str]:
    """Return the environment without the place in a job that belongs to an ancestor.

    A process that a rank starts inherits the RANK, WORLD_SIZE and MASTER_ADDR that hpcdist has set
    for the rank, and would look for the rank's peers. Where a program has set one of them itself,
    for a job of such processes, all are believed.

    Parameters
    ----------
    environ : mapping
        This process's environment.
    """
    found = dict(environ)
    ours = variables.exported(environ)
    meeting = {"RANK", "WORLD_SIZE", *variables.MASTER}
    if of_an_ancestor(environ) and meeting & set(environ) <= ours:
        for name in ours:
            del found[name]
    return found


def detect(env: Environ | None = None) -> Launch | None:
    """Read this process's place in the job from its launcher's variables.

    Parameters
    ----------
    env : mapping, optional
        Read instead of ``os.environ``.

    Returns
    -------
    Launch or None
        None if no launcher's variables are set: the process is not part of a job.

    Raises
    ------
    ValueError
        If a launcher's variable is not a whole number.
    """
    environ = own_variables(os.environ) if env is None else env
    launcher = find(env)
    return None if launcher is None else launcher.read(environ)


def starts_mpi(env: Environ | None = None) -> bool:
    """Return whether this process was started as part of an MPI job.

    Parameters
    ----------
    env : mapping, optional
        Read instead of ``os.environ``.

    Returns
    -------
    bool
        False for a process without a job, and under torchrun, srun without a plugin, or a script
        that sets RANK and WORLD_SIZE.
    """
    launcher = find(env)
    return launcher is not None and launcher.mpi
