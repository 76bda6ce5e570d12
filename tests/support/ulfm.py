"""The mark of tests of jobs that go on after a death, which few MPIs can do."""

from __future__ import annotations

import pytest
from mpis import OPEN_MPI

only_ulfm = pytest.mark.skipif(
    not OPEN_MPI, reason="this MPI has no fault tolerance: groups/test_reconfigure.py"
)
