"""torchrun and torch.distributed.launch."""

from __future__ import annotations

from .base import Launcher, mpi_family

__all__ = ["Torchrun"]


class Torchrun(Launcher):
    """Started by torchrun: its agents start plain processes, outside any MPI job."""

    name = "torchrun"
    mpi = False
    present = ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE")
    rank_variable = "RANK"
    size_variable = "WORLD_SIZE"
    local_rank_variable = "LOCAL_RANK"
    local_size_variable = "LOCAL_WORLD_SIZE"
    nodes_variable = "GROUP_WORLD_SIZE"  # agents: one per node

    def fix(self, library: str) -> str:
        """Torchrun's processes are not an MPI job: MPICH can make them one, others need mpirun."""
        family = mpi_family(library)
        if family != "Open MPI":
            return (
                "torchrun starts processes that are not an MPI job. Leave init_method out, or give "
                f"env://: hpcdist makes them one through torchrun's store ({family} allows it)."
            )
        return (
            "torchrun starts processes that are not an MPI job. Start them with "
            f"{family}'s launcher instead: mpirun -n N python ... (or srun)."
        )
