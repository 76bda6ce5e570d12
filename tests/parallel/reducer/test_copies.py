"""Copies of every kind of number, and changes that autograd does not count."""

from __future__ import annotations

import pytest
import torch

from hpcdist._graph import overlapping
from hpcdist.parallel.reducer.bucket import Bucket
from hpcdist.parallel.reducer.copies import copy_each, deliver, reals, unseen

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.complex64)


def test_reals_are_the_same_memory() -> None:
    flat, plain = numbers(3), torch.ones(3)
    reals(flat)[1] = 7
    assert flat[0].imag == 7 and reals(flat).shape == (6,)
    assert reals(plain) is plain


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float64, torch.bfloat16])
def test_a_result_arrives_in_the_buffer(dtype: torch.dtype) -> None:
    buffer = torch.zeros(4, dtype=torch.complex64 if dtype.is_complex else torch.float32)
    result = torch.arange(4).to(dtype) * (1 + 1j if dtype.is_complex else 1)
    deliver(result, buffer)
    assert torch.equal(buffer, result.to(buffer.dtype))
    if dtype.is_complex:
        deliver(result.conj(), buffer)
        assert torch.equal(buffer, result.conj())
        deliver(reals(result).bfloat16(), buffer)  # as a wrapper returns it
        assert torch.equal(buffer, result)
    kept = buffer.clone()
    deliver(buffer, buffer)
    deliver(reals(buffer), buffer)
    assert torch.equal(buffer, kept)


def test_a_result_that_repeats_the_start_of_the_buffer_is_copied() -> None:
    buffer = torch.arange(1.0, 5.0)
    deliver(buffer[:1].expand(4), buffer)
    assert buffer.tolist() == [1, 1, 1, 1]


def test_lazily_conjugated_and_negated_tensors_are_copied() -> None:
    one, other = numbers(2, 3), numbers(2, 3)
    negated = numbers(4).conj().imag
    assert one.conj().is_conj() and negated.is_neg()
    targets = [torch.empty_like(one), torch.empty(4), torch.empty(3, 2, dtype=one.dtype)]
    copy_each(targets, [one.conj(), negated, other.mH])
    assert torch.equal(targets[0], one.conj()) and torch.equal(targets[1], negated)
    assert torch.equal(targets[2], other.mH)
    into = torch.zeros(2, 3, dtype=one.dtype)
    assert copy_each([into.conj()], [one])  # torch's batched copy refuses such targets
    assert torch.equal(into, one.conj())
    assert copy_each([into, into.real.conj()[:1], into.conj().imag], [one, one.real[:1], one.imag])
    assert torch.equal(into, torch.complex(one.real, -one.imag))
    assert not copy_each([into], [one])
    with pytest.raises(RuntimeError):
        copy_each([torch.ones(2)], [torch.ones(3)])


@pytest.mark.parametrize("as_view", [False, True])
def test_a_bucket_takes_conjugated_gradients(as_view: bool) -> None:
    parameters = [torch.nn.Parameter(numbers(3, 2)), torch.nn.Parameter(numbers(4))]
    bucket = Bucket([0, 1], parameters, as_view)
    parameters[0].grad, parameters[1].grad = numbers(2, 3).mH, numbers(4).conj()
    wanted = [p.grad / 2 for p in parameters]
    bucket.pack()
    bucket.take(None, (), 2)
    assert all(torch.allclose(p.grad, w) for p, w in zip(parameters, wanted, strict=True))


def test_parts_of_real_numbers_are_cut_in_pairs() -> None:
    turned = torch.nn.Parameter(numbers(3, 2).t())
    holes = torch.nn.Parameter(numbers(4)[::2])
    bucket = Bucket([0, 1], [turned, holes])
    bucket.buffer.copy_(numbers(8))
    for dtype in (torch.float32, torch.float64):
        for view, part in zip(
            bucket.views, bucket.cut(reals(bucket.buffer).to(dtype)), strict=True
        ):
            assert part.is_complex() and torch.equal(part.to(view.dtype), view)
            assert part.stride() == view.stride()
    for part, view in zip(bucket.cut(reals(bucket.buffer).half()), bucket.views, strict=True):
        assert part.dtype == torch.half and part.shape == (*view.shape, 2)
        assert torch.equal(part, torch.view_as_real(view).half())


def test_changes_that_autograd_does_not_count() -> None:
    buffer, weight = torch.ones(3), torch.ones(3, requires_grad=True)
    with torch.inference_mode():
        foreign = torch.ones(3)
    result = (weight * buffer).sum()
    with unseen([buffer, foreign]), torch.no_grad():
        buffer.detach().add_(1)
    result.backward()
    assert weight.grad.tolist() == [2, 2, 2]
    result = (weight * buffer).sum()
    buffer.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


def test_tensors_in_the_memory_of_others() -> None:
    one, other = torch.zeros(4, 4), torch.zeros(4, dtype=torch.complex64)
    image = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert overlapping([]) == overlapping([None]) == []
    assert overlapping([one, None, other, image, torch.tensor(1.0)]) == []
    assert overlapping([one[0], one[1], one[3], one[2]]) == []  # side by side
    assert overlapping([image[1], image[0], other[:2], other[2:]]) == []
    assert overlapping([one[:0], one[:0], one[0], torch.zeros(0)]) == []
    assert overlapping([other, one, None, one.view(16)]) in ([1], [3])
    assert overlapping([one[0, 1:], one[0], one[1]]) == [0]
    assert overlapping([one[3, 3], one]) == [0]
    assert overlapping([one[0, 2:].expand(3, 2), one[0]]) == [0]
    assert overlapping([one[0, 3:].expand(4), one[0, :3]]) == []
    assert overlapping([one[:, 0], one[3]]) == [1]  # a column, with gaps
    assert overlapping([other.conj(), other[1:].real]) == [1]
    assert overlapping([image[1], image]) == [0]
    assert sorted(overlapping([one[:2], one[1:3], one[2:]])) == [1]  # both others remain
    parted = [one.view(16)[i:] for i in range(16)]
    assert sorted(overlapping(parted)) == list(range(1, 16))
