"""The nodes of the batch job that this process is in, as mpirun finds them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hpcdist.launchers.variables import first_host

#: Variables by which a batch system names the nodes of a job, or their number.
LISTS = (
    *("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
    *("PBS_NODEFILE", "LSB_MCPU_HOSTS"),
)


def nodes(environ: Mapping[str, str]) -> tuple[int, str]:
    """Return how many nodes the batch job of an environment has, and the name of the first.

    Parameters
    ----------
    environ : mapping
        The environment.

    Returns
    -------
    tuple of int and str
        1 and "" outside a batch job, or where the nodes cannot be told.
    """
    for kind in ("STEP", "JOB"):  # srun gives a shell fewer nodes than the job has
        text = environ.get(f"SLURM_{kind}_NUM_NODES", "").strip()
        if text.isdecimal() and int(text) > 0:
            return int(text), first_host(environ.get(f"SLURM_{kind}_NODELIST", ""))
    hosts: list[str] = []
    if environ.get("PBS_NODEFILE"):
        try:
            hosts = Path(environ["PBS_NODEFILE"]).read_text().split()  # a line per core
        except (OSError, UnicodeDecodeError):
            hosts = []
    elif environ.get("LSB_MCPU_HOSTS"):
        hosts = environ["LSB_MCPU_HOSTS"].split()[::2]  # each with its number of cores
    names = list(dict.fromkeys(hosts))
    return (len(names), names[0]) if names else (1, "")
