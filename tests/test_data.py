"""DistributedSampler against torch's, which serves as the reference."""

from __future__ import annotations

import pytest
from torch.utils.data.distributed import DistributedSampler as TorchSampler

from hpcdist import DistributedSampler

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]


@pytest.mark.parametrize("length", [0, 1, 2, 3, 7, 8, 100, 101])
@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
def test_same_indices_as_torch(length: int, replicas: int, shuffle: bool, drop_last: bool) -> None:
    data = range(length)
    for rank in range(replicas):
        arguments = {"shuffle": shuffle, "seed": 5, "drop_last": drop_last}
        ours = DistributedSampler(data, replicas, rank, **arguments)
        theirs = TorchSampler(data, replicas, rank, **arguments)
        for epoch in (0, 1, 7):
            ours.set_epoch(epoch)
            theirs.set_epoch(epoch)
            assert list(ours) == list(theirs)
            assert len(ours) == len(theirs) == len(list(ours))
        assert ours.total_size == theirs.total_size


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_together_the_ranks_see_everything(replicas: int) -> None:
    data = range(50)
    shares = [list(DistributedSampler(data, replicas, r)) for r in range(replicas)]
    assert {i for share in shares for i in share} == set(data)
    assert len({len(share) for share in shares}) == 1
    tailless = [DistributedSampler(data, replicas, r, drop_last=True) for r in range(replicas)]
    kept = [i for share in tailless for i in share]
    assert len(kept) == len(set(kept)) == 50 - 50 % replicas


def test_epochs_differ_and_repeat() -> None:
    sampler = DistributedSampler(range(64), 2, 1, seed=3)
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert list(DistributedSampler(range(64), 2, 1, seed=4)) != first


@pytest.mark.parametrize(("replicas", "rank"), [(2, 2), (2, -1), (1, 1), (0, 0), (-1, 0)])
def test_refuses_ranks_out_of_range(replicas: int, rank: int) -> None:
    with pytest.raises(ValueError, match=r"rank|num_replicas"):
        DistributedSampler(range(4), replicas, rank)


def test_yields_plain_integers() -> None:
    assert all(type(i) is int for i in DistributedSampler(range(9), 2, 0))


@pytest.mark.parametrize("length", [0, 3, 8, 9, 11, 12, 13, 100])
@pytest.mark.parametrize("drop_last", [True, False])
def test_a_data_set_whose_length_has_changed(length: int, drop_last: bool) -> None:
    """What would be left out, or with `drop_last` repeated, is an error; else as torch's."""
    data = list(range(10))
    arguments = {"shuffle": False, "drop_last": drop_last}
    ours = DistributedSampler(data, 3, 1, **arguments)
    theirs = TorchSampler(data, 3, 1, **arguments)
    before = list(ours)
    data[:] = range(length)
    least, most = (9, 11) if drop_last else (1, 12)
    if least <= length <= most:
        assert list(ours) == list(theirs)
    else:
        with pytest.raises(ValueError, match=f"has {length} samples now"):
            list(ours)
    data[:] = range(10)
    assert list(ours) == before
