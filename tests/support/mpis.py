"""Which MPI the tests run on, and for which one the engine was built."""

from __future__ import annotations

from hpcdist import _engine, _loader
from hpcdist.launchers import mpi_family

FAMILY = mpi_family(_engine.library_version())
OPEN_MPI = FAMILY == "Open MPI"

#: ``openmpi``, ``mpich``, or ``abi`` for the standard ABI, whose engine runs on either of them.
BUILT_FOR = _loader.build_info()["mpi_family"]
#: Whether its limits are those for Open MPI: HD_MAYBE_OPEN_MPI in hd_comm.h.
OPEN_MPI_LIMITS = BUILT_FOR in ("openmpi", "abi")
