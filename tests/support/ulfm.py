"""The mark of tests of jobs that go on after a death, which few MPIs can do."""

from __future__ import annotations

import pytest

from hpcdist import _engine
from hpcdist.launchers import mpi_family

OPEN_MPI = mpi_family(_engine.library_version()) == "Open MPI"
only_ulfm = pytest.mark.skipif(
    not OPEN_MPI, reason="this MPI has no fault tolerance: groups/test_reconfigure.py"
)
