"""srun, with each of its MPI plugins.

Under sbatch with another launcher every process sees ``SLURM_PROCID=0``, and ``SLURM_NTASKS``
counts srun's own tasks: these classes come last in the order, and take the size from the step.
"""

from __future__ import annotations

import re

from .base import Environ, Launcher, mpi_family

__all__ = ["Slurm", "SlurmPmi2", "SlurmPmix", "unused_tasks"]

# "2(x3),1" is three nodes with two tasks each, then one node with one
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?$")

_PLUGIN = {
    "Open MPI": "--mpi=pmix",
    "MPICH": "--mpi=pmi2",
    "MVAPICH": "--mpi=pmi2",
    "Cray MPICH": "--mpi=cray_shasta",
    "Intel MPI": "--mpi=pmi2 (with I_MPI_PMI_LIBRARY naming Slurm's libpmi2.so)",
}


class Slurm(Launcher):
    """Started by srun without an MPI plugin: N processes without a connection to each other."""

    name = "srun"
    mpi = False
    plugin = "none"
    present: tuple[str, ...] = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    rank_variable = "SLURM_PROCID"
    size_variable = "SLURM_STEP_NUM_TASKS"
    local_rank_variable = "SLURM_LOCALID"
    nodes_variable = "SLURM_STEP_NUM_NODES"  # not SLURM_NNODES: those of the allocation

    def local_size(self, env: Environ) -> int | None:
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


class SlurmPmi2(Slurm):
    """Started by srun --mpi=pmi2."""

    name = "srun --mpi=pmi2"
    mpi = True
    plugin = "pmi2"
    rank_variable = "PMI_RANK"
    size_variable = "PMI_SIZE"
    present = ("SLURM_PROCID", "PMI_RANK", "PMI_SIZE")

    def detect(self, env: Environ) -> bool:
        """Whether the plugin's variables are set, and srun names this plugin."""
        return super().detect(env) and env.get("SLURM_MPI_TYPE") == self.plugin


class SlurmPmix(Slurm):
    """Started by srun --mpi=pmix, which exports the rank; the size is that of the step."""

    name = "srun --mpi=pmix"
    mpi = True
    plugin = "pmix"
    rank_variable = "PMIX_RANK"
    present = ("SLURM_PROCID", "PMIX_RANK")

    def detect(self, env: Environ) -> bool:
        """Whether the plugin's variables are set, and srun names this plugin (or pmix_v4, ...)."""
        return super().detect(env) and env.get("SLURM_MPI_TYPE", "").startswith(self.plugin)


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
