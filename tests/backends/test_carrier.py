"""The type of what carries a group's operations, beside what carries them.

What a type checker finds is in tests/types/carrier.py.
"""

from __future__ import annotations

import pytest

from hpcdist._engine import Comm
from hpcdist.backends.base import GroupBackend
from hpcdist.backends.carrier import Carrier
from hpcdist.backends.dispatch import Dispatch
from hpcdist.backends.hooked import Hooked
from hpcdist.groups.hooks import Hooks
from hpcdist.operations import OPERATIONS

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]

NAMES = sorted(
    name for name in (*vars(Carrier), *Carrier.__annotations__) if not name.startswith("_")
)


def test_all_operations_are_there():
    assert set(OPERATIONS) < set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_everything_behind_a_group_has_it(name):
    backend = GroupBackend(0, 1)
    both = {"cpu": backend, "cuda": GroupBackend(0, 1)}
    for each in (Comm, backend, Dispatch(both), Hooked(both, Hooks())):
        assert hasattr(each, name), each
    about = OPERATIONS.get(name)
    for kind in (Dispatch, Hooked):
        assert about is None or hasattr(kind, name) or about.serves is None
