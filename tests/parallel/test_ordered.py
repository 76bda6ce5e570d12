"""Averages of tensors of which a rank may have several: in the order of their numbers."""

from __future__ import annotations

import pytest
import torch
from cases import Check, draw, here

import hpcdist as dist
from hpcdist.parallel import ordered

pytestmark = pytest.mark.ranks

SHAPES = [(3, 5), (), (0,), (7,), (4, 2, 3)]


def dealt(count: int) -> list[list[int]]:
    """Uneven, and not in the order of ranks: where there are several, the last one has none."""
    size = here()[1]
    return [[n for n in range(count) if (n * n) % max(size - 1, 1) == r] for r in range(size)]


def in_turn(parts: list[torch.Tensor]) -> torch.Tensor:
    """What an all-reduce on one node computes if each part is a rank's."""
    half = parts[0].dtype == torch.float16
    parts = [part * (1 / len(parts)) for part in parts] if half else parts
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total if half else total / len(parts)


@pytest.mark.parametrize("piece", [32, ordered.PIECE])
def test_the_bits_are_those_of_the_sum_in_turn(rng, monkeypatch, piece):
    monkeypatch.setattr(ordered, "PIECE", piece)
    check, (rank, _) = Check(), here()
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
    for count in (1, 2, 5):
        lists = [[draw(rng, d, s) for d in dtypes for s in SHAPES] for _ in range(count)]
        mine = [lists[n] for n in dealt(count)[rank]]
        results = [torch.empty_like(t) for t in lists[0]]
        ordered.average(dist.group.WORLD.carrier, dealt(count), mine, results)
        for place, result in enumerate(results):
            want = in_turn([torch.view_as_real(each[place]) if result.is_complex() else each[place]
                            for each in lists])  # fmt: skip
            got = torch.view_as_real(result) if result.is_complex() else result
            check.equal(got, want, f"{count} lists, {result.dtype} {tuple(result.shape)}")
    check.done()


def test_missing_tensors_are_zeros_and_results_may_be_inputs(rng):
    check, (rank, size) = Check(), here()
    lists = [[draw(rng, torch.float32, (6, 4)).t(), draw(rng, torch.float32, 9)] for _ in range(3)]
    lists[1][1] = None
    deal = [[n for n in range(3) if n % size == r] for r in range(size)]
    mine = [lists[n] for n in deal[rank]]
    second = next((row[1] for row in mine if row[1] is not None), torch.empty(9))
    results = [torch.empty(4, 6), second]
    wanted = [in_turn([row[0] for row in lists]),
              in_turn([lists[0][1], torch.zeros(9), lists[2][1]])]  # fmt: skip
    ordered.average(dist.group.WORLD.carrier, deal, mine, results)
    check.equal(results[0], wanted[0], "not contiguous")
    check.equal(results[1], wanted[1], "in place of one of them")
    check.done()


def test_another_dtype(rng):
    check, (rank, size) = Check(), here()
    lists = [[draw(rng, torch.float32, 33)] for _ in range(size)]
    result = torch.empty(33)
    deal = [[r] for r in range(size)]
    ordered.average(dist.group.WORLD.carrier, deal, [lists[rank]], [result], torch.bfloat16)
    check.equal(result, in_turn([row[0].bfloat16() for row in lists]).float(), "in bfloat16")
    check.done()
