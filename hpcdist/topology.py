"""Which cores this process may use, and what to say when they are too few."""

from __future__ import annotations

import os

__all__ = ["allowed_cpus", "binding_advice"]


def allowed_cpus() -> frozenset[int]:
    """Cores this process may run on.

    Returns
    -------
    frozenset of int
        From the affinity mask, which launchers set; all cores where the system has no masks.
    """
    try:
        return frozenset(os.sched_getaffinity(0))
    except AttributeError:
        return frozenset(range(os.cpu_count() or 1))


def binding_advice(family: str, cpus: frozenset[int], machine_cpus: int) -> str | None:
    """Say what to pass to the launcher when all threads of a rank share one core.

    A rank has its main thread, torch's threads and hpcdist's communication thread. On one core they
    take turns, and communication does not overlap computation.

    Parameters
    ----------
    family : str
        The MPI implementation, as :func:`hpcdist.launchers.mpi_family` names it.
    cpus : frozenset of int
        Cores this rank may use.
    machine_cpus : int
        Cores of the machine.

    Returns
    -------
    str or None
        The advice; None when the rank has more than one core, or the machine has only one.
    """
    if len(cpus) > 1 or machine_cpus <= 1:
        return None
    if family == "Open MPI":
        option = "mpirun --bind-to none, or --map-by slot:PE=2 --bind-to core for two cores a rank"
    elif family in ("MPICH", "Intel MPI", "MVAPICH"):
        option = "mpirun -bind-to none"
    else:
        option = "the launcher's option for unbound processes"
    core = ", ".join(str(cpu) for cpu in sorted(cpus))
    return (
        f"this rank and all its threads are bound to core {core} of {machine_cpus}: communication "
        f"will not overlap computation. Pass {option}; under srun --cpus-per-task=2 "
        "--cpu-bind=cores. torch sees one core too."
    )
