"""Which groups the ranks make again together."""

import pytest

from hpcdist.groups.rebuild import plan

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]


def test_the_plan_is_the_same_in_whatever_order_ranks_have_their_groups():
    first, second, third = ("[0, 1]#1", (0, 1)), ("[2, 5]#2", (2,)), ("[1, 2]#1", (1, 2))
    found = plan([[first], [third, first], [second, third]])
    assert found.turns == [[first, second], [third]]
    assert found.taken == {"[0, 1]": 1, "[2, 5]": 2, "[1, 2]": 1}
    assert not found.lost
    found = plan([[first, first], [first, first, third], []])
    assert not found.turns and not found.taken
    assert found.lost[third].startswith("rank 2 has destroyed it"), found.lost
    assert found.lost[first] == "two groups have its name and its ranks"
