"""Process managers known only by their interface (PMI, PMIx), and bare environments."""

from __future__ import annotations

from .base import Launcher, mpi_family

__all__ = ["Environment", "Pmi", "Pmix"]


class Pmi(Launcher):
    """Started by a process manager that speaks PMI-1 or PMI-2."""

    name = "a PMI process manager"
    over_pmi_fd = True
    present = ("PMI_RANK", "PMI_SIZE")
    rank_variable = "PMI_RANK"
    size_variable = "PMI_SIZE"


class Pmix(Launcher):
    """Started by a process manager that speaks PMIx (prun, prterun): only MPI knows the size."""

    name = "a PMIx process manager"
    present = ("PMIX_RANK",)
    rank_variable = "PMIX_RANK"


class Environment(Launcher):
    """Started by hand, or by a script, with torch.distributed's own variables."""

    name = "the variables RANK and WORLD_SIZE"
    mpi = False
    present = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
    rank_variable = "RANK"
    size_variable = "WORLD_SIZE"
    local_rank_variable = "LOCAL_RANK"
    local_size_variable = "LOCAL_WORLD_SIZE"

    def fix(self, library: str) -> str:
        """No launcher started an MPI job: MPICH can make one, other MPIs need a launcher."""
        family = mpi_family(library)
        if family != "Open MPI":
            return (
                "RANK, WORLD_SIZE and MASTER_ADDR do not make an MPI job. Leave init_method out, "
                f"or give env://: then hpcdist makes one ({family} allows it)."
            )
        return (
            "RANK, WORLD_SIZE and MASTER_ADDR do not make an MPI job. Start the processes with "
            f"{family}'s launcher instead: mpirun -n N python ... (or srun)."
        )
