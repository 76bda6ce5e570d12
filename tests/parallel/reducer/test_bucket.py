"""How gradients are divided into buckets, and the copies in and out of one."""

from __future__ import annotations

import pytest
import torch

from hpcdist.parallel.reducer.bucket import Bucket, assign_buckets, is_dense

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]

KB = 256  # float32 elements


def floats(*kib: int) -> list[torch.Tensor]:
    return [torch.zeros(k * KB) for k in kib]


@pytest.mark.parametrize(
    ("sizes", "caps", "expected"),
    [
        ((1, 1, 1, 1), [2048], [[0, 1], [2, 3]]),
        ((1, 1, 1, 1), [1024, 3072], [[0], [1, 2, 3]]),
        ((1, 1, 1), [0], [[0], [1], [2]]),
        ((1, 1, 1), [1 << 30], [[0, 1, 2]]),
        ((1, 5, 1), [2048], [[0, 1], [2]]),  # closed after the cap is reached, not before
        ((1, 1, 1, 1, 1), [1024, 2048], [[0], [1, 2], [3, 4]]),  # the last cap repeats
        ((0, 0, 1), [1024], [[0, 1, 2]]),
        ((5, 1, 1, 1), [1024, 2048], [[0], [1, 2], [3]]),
    ],
)
def test_sizes(sizes: tuple[int, ...], caps: list[int], expected: list[list[int]]) -> None:
    assert assign_buckets(floats(*sizes), range(len(sizes)), caps) == expected


def test_keeps_to_the_order_given() -> None:
    assert assign_buckets(floats(1, 1, 1, 1), [3, 2, 1, 0], [1024, 2048]) == [[3], [2, 1], [0]]


def test_one_dtype_a_bucket_and_each_with_its_first_cap() -> None:
    parameters = [torch.zeros(4 * KB, dtype=t) for t in (torch.float32, torch.float64) * 3]
    found = assign_buckets(parameters, range(6), [1, 1 << 20])
    assert found == [[0], [1], [2, 4], [3, 5]]


def test_buckets_become_smaller_towards_the_end() -> None:
    found = assign_buckets(floats(*[1] * 20), range(20), [1024, 8192], tail=1024)
    assert [len(members) for members in found] == [1, 8, 6, 3, 1, 1]
    assert sum(found, []) == [*range(20)]


def test_a_sparse_parameter_is_alone_and_takes_no_place_among_the_caps() -> None:
    found = assign_buckets(floats(1, 9, 1, 1), range(4), [2048], sparse={1})
    assert found == [[1], [0, 2], [3]]


def test_buckets_stand_in_the_order_in_which_they_fill() -> None:
    # The float64 bucket is begun first but can only be full at the very end.
    kinds = (torch.float64, torch.float32, torch.float32, torch.float64)
    parameters = [torch.zeros(KB, dtype=t) for t in kinds]
    assert assign_buckets(parameters, range(4), [1 << 20]) == [[1, 2], [0, 3]]


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.zeros(2, 3), True),
        (torch.zeros(2, 3).t(), True),
        (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.zeros(()), True),
        (torch.zeros(1).expand(4), False),
        (torch.zeros(4, 4)[:, :2], False),
        (torch.zeros(4, 4)[:, :1][:1], True),
        (torch.zeros(3)[::2], False),
    ],
)
def test_is_dense(tensor: torch.Tensor, dense: bool) -> None:
    assert is_dense(tensor) is dense


def shapes() -> list[torch.nn.Parameter]:
    return [
        torch.nn.Parameter(t)
        for t in (
            torch.randn(3, 4),
            torch.randn(()),
            torch.randn(0, 2),
            torch.randn(5, 2).t(),
            torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
            torch.randn(6, 6)[:, ::2],
        )
    ]


@pytest.mark.parametrize("as_view", [False, True])
def test_pack_and_unpack(as_view: bool) -> None:
    parameters = shapes()
    bucket = Bucket(list(range(len(parameters))), parameters, as_view)
    assert bucket.buffer.shape == (sum(p.numel() for p in parameters),)
    for p in parameters:
        p.grad = torch.randn_like(p)
    expected = [p.grad.clone() for p in parameters]
    bucket.pack()
    assert all(torch.equal(v, e) for v, e in zip(bucket.views, expected, strict=True))
    bucket.buffer.mul_(2)
    bucket.take(None, (), None)
    assert all(torch.equal(p.grad, 2 * e) for p, e in zip(parameters, expected, strict=True))
    assert all((p.grad is v) == as_view for p, v in zip(parameters, bucket.views, strict=True))


@pytest.mark.parametrize("as_view", [False, True])
def test_a_missing_gradient_counts_as_zeros(as_view: bool) -> None:
    parameters = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))]
    bucket = Bucket([0, 1], parameters, as_view)
    bucket.buffer.fill_(7)
    parameters[0].grad = torch.ones(2)
    bucket.pack()
    assert bucket.buffer.tolist() == [1, 1, 0, 0, 0]
    bucket.buffer.add_(1)
    bucket.take(None, (), None)
    assert parameters[0].grad.tolist() == [2, 2]
    assert parameters[1].grad.tolist() == [1, 1, 1]


def test_memory_comes_from_the_allocator() -> None:
    asked = []

    def allocator(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        asked.append((numel, dtype, device.type))
        return torch.empty(numel, dtype=dtype, device=device)

    Bucket([0], [torch.zeros(3, 2, dtype=torch.float64)], allocator=allocator)
    assert asked == [(6, torch.float64, "cpu")]


def test_dense_parameters_keep_their_strides() -> None:
    parameter = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    bucket = Bucket([0], [parameter])
    assert bucket.views[0].stride() == parameter.stride()


def test_another_dtype_for_the_buffer() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    bucket = Bucket([0], [parameter], as_view=True, dtype=torch.bfloat16)
    parameter.grad = torch.tensor([1.0, 2.0, 1.0 + 2**-20])
    bucket.pack()
    assert bucket.buffer.dtype == torch.bfloat16 and bucket.buffer.tolist() == [1, 2, 1]
    bucket.take(None, (), 2)
    assert parameter.grad.dtype == torch.float32 and parameter.grad.tolist() == [0.5, 1, 0.5]


@pytest.mark.parametrize("as_view", [False, True])
def test_unused_parameters_keep_or_get_their_gradients(as_view: bool) -> None:
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(4)]
    bucket = Bucket([0, 1, 2, 3], parameters, as_view)
    for p in parameters[:3]:
        p.grad = torch.full((2,), 3.0)
    bucket.pack()
    bucket.take(None, (), None)
    bucket.reset()
    bucket.unused = [1, 2, 3]
    kept = parameters[1].grad
    parameters[3].grad = None
    bucket.pack()
    bucket.buffer.add_(1)
    bucket.take(None, [1, 3], None)  # 2 was used elsewhere
    assert parameters[1].grad is kept and kept.tolist() == [3, 3]
    assert parameters[2].grad.tolist() == [4, 4]
    assert parameters[3].grad is None


def test_a_sparse_gradient_that_nobody_announced_becomes_dense() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3, 2))]
    bucket = Bucket([0, 1], parameters)
    parameters[0].grad = torch.ones(2)
    parameters[1].grad = torch.sparse_coo_tensor([[0, 0]], torch.ones(2, 2), (3, 2))
    bucket.pack()
    assert bucket.buffer.tolist() == [1, 1, 2, 2, 0, 0, 0, 0]
    bucket.take(None, (), None)
    assert parameters[1].grad.tolist() == [[2, 2], [0, 0], [0, 0]]
