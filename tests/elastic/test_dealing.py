"""Which rank computes which share of a batch."""

from __future__ import annotations

import itertools

import pytest

from hpcdist.elastic.dealing import deal

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]


def test_while_no_rank_has_died_each_has_its_own():
    assert deal(4, [0, 1, 2, 3]) == [[0], [1], [2], [3]]


@pytest.mark.parametrize(
    ("homes", "dealt"),
    [
        ([0, 2, 3], [[0], [1, 2], [3]]),  # to the next rank, which has the copy
        ([1, 2, 3], [[0, 1], [2], [3]]),
        ([0, 1, 2], [[0, 3], [1], [2]]),
        ([2, 3], [[0, 2], [1, 3]]),
        ([1], [[0, 1, 2, 3]]),
        ([0, 1, 2, 3, None], [[0], [1], [2], [3], []]),  # more ranks than at the start
        ([0, 1, 3, None], [[0], [1], [3], [2]]),
    ],
)
def test_the_shares_of_dead_ranks(homes, dealt):
    assert deal(4, homes) == dealt


def test_all_shares_are_dealt_evenly_and_a_rank_keeps_its_own():
    for count in range(1, 8):
        for living in range(1, count + 1):
            for homes in itertools.combinations(range(count), living):
                dealt = deal(count, homes)
                assert sorted(itertools.chain(*dealt)) == list(range(count))
                assert all(home in shares for home, shares in zip(homes, dealt, strict=True))
                assert len(dealt[0]) - 1 <= min(map(len, dealt)), (homes, dealt)
                assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
                assert dealt[0][0] == 0
