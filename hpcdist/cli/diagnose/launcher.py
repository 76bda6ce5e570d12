"""The launcher that started this process, by its variables, and whether MPI knows of it."""

from __future__ import annotations

from hpcdist import launchers

from .section import FAULT, Place, Section

#: Beginnings of the variables that launchers and batch systems set.
_SPOKEN = ("OMPI_COMM_WORLD_", "PMI_", "PMIX_RANK", "MPI_LOCAL", "SLURM_PROCID", "SLURM_STEP_",
           "SLURM_LOCALID", "SLURM_NODEID", "SLURM_JOB_ID", "SLURM_MPI_TYPE", "SLURM_CPU_BIND",
           "SLURM_CPUS_PER_TASK", "PALS_", "FLUX_TASK", "FLUX_JOB_", "JSM_NAMESPACE_",
           "MV2_COMM_WORLD_", "TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK",
           "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PBS_JOBID", "LSB_JOBID")  # fmt: skip
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD", "COOKIE", "FD", "SECURITY")


def collect(place: Place) -> Section:
    """Check the launcher, its variables, and MPI's view of the job."""
    section = Section("launcher", "Launcher")
    found = launchers.find(place.env)
    section.fact("launcher", found.name if found else "none")
    for name in sorted(place.env):
        if name.startswith(_SPOKEN) and not any(word in name for word in _SECRET):
            section.fact(name, place.env[name][:200], "rank")
    try:
        launch = launchers.detect(place.env)
    except ValueError as error:
        section.find(FAULT, str(error), "start the job with the launcher itself, not with a copy "
                     "of its variables")  # fmt: skip
        return section
    if launch is not None and launch.nodes is not None:
        section.fact("nodes, as it says", launch.nodes)
    if not place.running:
        return section
    from hpcdist import _engine

    rank, size = _engine.world_rank_size()
    section.fact("MPI's rank", rank, "rank")
    section.fact("MPI's size", size)
    if launch is not None and found is not None and (launch.size or 1) > 1 and size == 1:
        section.find(
            FAULT,
            f"{launch.launcher} started {launch.size} processes, and MPI sees one: each would be a "
            "world of its own",
            found.fix(_engine.library_version()),
        )
    return section
