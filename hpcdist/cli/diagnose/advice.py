"""The same advice in the words of each MPI: its launcher's options and its own variables."""

from __future__ import annotations

from hpcdist import _engine, launchers

#: Subject -> MPI -> what to use; "" for an MPI that is not listed.
_WORDS = {
    "transport": {
        "Open MPI": "OMPI_MCA_pml_base_verbose=10 or UCX_LOG_LEVEL=info",
        "MPICH": "MPIR_CVAR_DEBUG_SUMMARY=1 or UCX_LOG_LEVEL=info",
        "Intel MPI": "I_MPI_DEBUG=5",
        "": "UCX_LOG_LEVEL=info",
    },
    "environment": {
        "Open MPI": "mpirun -x NAME",
        "MPICH": "mpirun -genv NAME VALUE",
        "Intel MPI": "mpirun -genv NAME VALUE",
        "": "the launcher's option for variables",
    },
    "cores": {
        "Open MPI": "mpirun --map-by slot:PE=n --bind-to core",
        "MPICH": "mpirun -bind-to core:n",
        "Intel MPI": "I_MPI_PIN_DOMAIN=n",
        "": "the launcher's option for n cores per rank",
    },
    "NUMA": {
        "Open MPI": "mpirun --map-by ppr:1:numa --bind-to numa",
        "MPICH": "mpirun -bind-to numa",
        "Intel MPI": "I_MPI_PIN_DOMAIN=numa",
        "": "the launcher's option that binds to NUMA nodes",
    },
}

#: Beginnings of variables that one MPI alone reads.
_OWN = {
    "OMPI_MCA_": ("Open MPI",),
    "MPICH_": ("MPICH", "Cray MPICH", "Intel MPI"),
    "MPIR_CVAR_": ("MPICH", "Cray MPICH", "MVAPICH"),
    "I_MPI_": ("Intel MPI",),
}


def give(subject: str, family: str | None = None) -> str:
    """Return the advice on a subject for an MPI, by default the one in this process."""
    words = _WORDS[subject]
    return words.get(_here() if family is None else family, words[""])


def is_of_another(variable: str, family: str | None = None) -> bool:
    """Whether a variable is another MPI's: this one does not read it."""
    family = _here() if family is None else family
    owners = next((mpis for prefix, mpis in _OWN.items() if variable.startswith(prefix)), ())
    return bool(owners) and family not in (*owners, "this MPI")


def _here() -> str:
    return launchers.mpi_family(_engine.library_version())
