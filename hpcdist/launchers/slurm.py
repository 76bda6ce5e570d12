"""srun, with each of its MPI plugins.

Under sbatch with another launcher every process sees ``SLURM_PROCID=0``, and ``SLURM_NTASKS``
counts srun's own tasks: srun comes last in the order, and takes the size from the step.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .base import Environ, Launcher, mpi_family

# "2(x3),1" is three nodes with two tasks each, then one node with one
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?$")

_PLUGIN = {
    "Open MPI": "--mpi=pmix",
    "MPICH": "--mpi=pmi2",
    "MVAPICH": "--mpi=pmi2",
    "Cray MPICH": "--mpi=cray_shasta",
    "Intel MPI": "--mpi=pmi2 (with I_MPI_PMI_LIBRARY naming Slurm's libpmi2.so)",
}


@dataclass(frozen=True)
class Slurm(Launcher):
    """Started by srun; without a plugin: N processes without a connection to each other.

    Parameters
    ----------
    plugin : str
        What ``--mpi`` was, or how it begins (``pmix_v4``).
    """

    size: str = "SLURM_STEP_NUM_TASKS"
    local_rank: str = "SLURM_LOCALID"
    nodes: str = "SLURM_STEP_NUM_NODES"  # not SLURM_NNODES: those of the allocation
    plugin: str = "none"

    def detect(self, env: Environ) -> bool:
        """Return whether the variables are set, and srun names this plugin, if it is one."""
        named = env.get("SLURM_MPI_TYPE", "").startswith(self.plugin)
        return super().detect(env) and (named or self.plugin == "none")

    def processes_here(self, env: Environ) -> int | None:
        """Return the tasks of this step on this node, from the step's tasks per node."""
        node = self.number(env, "SLURM_NODEID")
        if node is None:
            return None
        for part in env.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
            match = _TASKS.match(part.strip())
            if match is None:
                return None
            repeat = int(match[2] or 1)
            if node < repeat:
                return int(match[1])
            node -= repeat
        return None

    def fix(self, library: str) -> str:
        """Name the plugin that starts this MPI library's processes."""
        family = mpi_family(library)
        wanted = _PLUGIN.get(
            family, "--mpi=pmix or --mpi=pmi2 (srun --mpi=list shows what is there)"
        )
        return (
            f"The job step ran with srun --mpi={self.plugin}, which does not start {family}'s "
            f"processes. Use: srun {wanted}"
        )


def unused_tasks(env: Environ) -> int:
    """Return the number of tasks of a Slurm job that this process runs in without a job step.

    A batch script runs once, on the first node, whatever the number of tasks.

    Parameters
    ----------
    env : mapping
        The environment.

    Returns
    -------
    int
        0 outside Slurm, in a step, and in a job of one task.
    """
    if "SLURM_JOB_ID" not in env or "SLURM_STEP_NUM_TASKS" in env:
        return 0
    tasks = env.get("SLURM_NTASKS", "").strip()
    return int(tasks) if tasks.isdecimal() and int(tasks) > 1 else 0
