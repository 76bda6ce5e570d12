"""The launchers, a row each: the environment variables that each sets."""

from __future__ import annotations

from dataclasses import dataclass

from .base import Launcher, mpi_family
from .slurm import Slurm


@dataclass(frozen=True)
class WithoutMpi(Launcher):
    """A launcher whose processes are not an MPI job; MPICH can make them one.

    Parameters
    ----------
    problem : str
        What is wrong with the start, for messages.
    """

    problem: str = ""
    mpi: bool = False

    def fix(self, library: str) -> str:
        """Return what makes the processes an MPI job; MPIs other than MPICH need a launcher."""
        family = mpi_family(library)
        if family != "Open MPI":
            return (
                f"{self.problem}. Omit init_method, or give env://: then hpcdist makes one "
                f"({family} allows it)."
            )
        return (
            f"{self.problem}. Start the processes with {family}'s launcher instead: "
            "mpirun -n N python ... (or srun)."
        )


OPEN_MPI = Launcher(
    "Open MPI's mpirun",
    present=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    rank="OMPI_COMM_WORLD_RANK",
    size="OMPI_COMM_WORLD_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    nodes="OMPI_MCA_orte_num_nodes",  # version 4; version 5 does not export it
)
HYDRA = Launcher(
    "hydra (the mpirun of MPICH and Intel MPI)",
    present=("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),  # srun and PALS set PMI_RANK too
    rank="PMI_RANK",
    size="PMI_SIZE",
    local_rank="MPI_LOCALRANKID",
    local_size="MPI_LOCALNRANKS",
    over_pmi_fd=True,
)
SLURM_PMIX = Slurm(
    "srun --mpi=pmix",
    present=("SLURM_PROCID", "PMIX_RANK"),
    rank="PMIX_RANK",
    plugin="pmix",
)
PMIX = Launcher("a PMIx process manager", present=("PMIX_RANK",), rank="PMIX_RANK")
ENVIRONMENT = WithoutMpi(
    "the variables RANK and WORLD_SIZE",
    present=("RANK", "WORLD_SIZE", "MASTER_ADDR"),
    rank="RANK",
    size="WORLD_SIZE",
    local_rank="LOCAL_RANK",
    local_size="LOCAL_WORLD_SIZE",
    problem="RANK, WORLD_SIZE and MASTER_ADDR do not make an MPI job",
)

#: The innermost launcher first. Slurm's with a plugin come before the bare PMI interfaces, whose
#: variables they share; plain srun after those, because an mpirun inside sbatch inherits its
#: variables.
ORDER: tuple[Launcher, ...] = (
    WithoutMpi(
        "torchrun",
        present=("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"),
        rank="RANK",
        size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_size="LOCAL_WORLD_SIZE",
        nodes="GROUP_WORLD_SIZE",  # agents: one per node
        problem="torchrun starts processes that are not an MPI job",
    ),
    OPEN_MPI,
    HYDRA,
    Launcher(
        "MVAPICH's mpirun_rsh",
        present=("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
        rank="MV2_COMM_WORLD_RANK",
        size="MV2_COMM_WORLD_SIZE",
        local_rank="MV2_COMM_WORLD_LOCAL_RANK",
        local_size="MV2_COMM_WORLD_LOCAL_SIZE",
        nodes="MV2_NUM_NODES_IN_JOB",
    ),
    Launcher(
        "PALS",  # of HPE Cray systems under PBS
        present=("PALS_RANKID",),
        rank="PALS_RANKID",
        size="PMI_SIZE",  # may be missing
        local_rank="PALS_LOCAL_RANKID",
        local_size="PALS_LOCAL_SIZE",
    ),
    Launcher(
        "jsrun",  # of IBM LSF systems
        present=("JSM_NAMESPACE_RANK",),  # LSB_JOBID and LSB_DJOB_RANKFILE mean only an LSF job
        rank="JSM_NAMESPACE_RANK",
        size="JSM_NAMESPACE_SIZE",
        local_rank="JSM_NAMESPACE_LOCAL_RANK",
        local_size="JSM_NAMESPACE_LOCAL_SIZE",
    ),
    Launcher(
        "flux run",
        present=("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
        rank="FLUX_TASK_RANK",
        size="FLUX_JOB_SIZE",
        local_rank="FLUX_TASK_LOCAL_ID",
        nodes="FLUX_JOB_NNODES",
    ),
    SLURM_PMIX,
    Slurm(
        "srun --mpi=pmi2",
        present=("SLURM_PROCID", "PMI_RANK", "PMI_SIZE"),
        rank="PMI_RANK",
        size="PMI_SIZE",
        plugin="pmi2",
    ),
    PMIX,
    Launcher(
        "a PMI process manager",
        present=("PMI_RANK", "PMI_SIZE"),
        rank="PMI_RANK",
        size="PMI_SIZE",
        over_pmi_fd=True,
    ),
    Slurm(
        "srun",
        present=("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
        rank="SLURM_PROCID",
        mpi=False,
    ),
    ENVIRONMENT,
)
