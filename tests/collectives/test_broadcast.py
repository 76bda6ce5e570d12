"""broadcast: every dtype, every root, bit for bit."""

import numpy as np
import pytest
import torch
from cases import MOVED, SIZES, Check, draw, finish, here, poison

import hpcdist as dist
from hpcdist.testing import parallel_raises

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_broadcast(rng, async_op):
    check, (rank, size) = Check(), here()
    for dtype in MOVED:
        for root in range(size):
            for n in SIZES:
                source = draw(rng, dtype, n)
                tensor = source.clone() if rank == root else poison(dtype, n)
                finish(dist.broadcast(tensor, root, async_op=async_op), async_op)
                check.equal(tensor, source, f"broadcast from {root} {dtype} n={n}")
    check.done()


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_broadcast_in_chunks(rng, async_op):
    check, (rank, size) = Check(), here()
    for dtype, n in [(torch.uint8, 9_000_001), (torch.float64, 1_100_003)]:
        source = draw(rng, dtype, 10_007).repeat(n // 10_007 + 1)[:n]
        root = size - 1
        tensor = source.clone() if rank == root else poison(dtype, n)
        finish(dist.broadcast(tensor, root, async_op=async_op), async_op)
        check.equal(tensor, source, f"broadcast {dtype} n={n}")
    check.done()


def test_shapes_and_layouts(rng):
    """Any shape; dense tensors of the same strides; views into larger memory."""
    check, (rank, _) = Check(), here()
    for shape in [(), (1,), (3, 0, 2), (4, 5), (2, 3, 4, 5)]:
        source = draw(rng, torch.float32, shape)
        tensor = source.clone() if rank == 0 else poison(torch.float32, shape)
        dist.broadcast(tensor, 0)
        check.equal(tensor, source, f"shape {shape}")
    source = draw(rng, torch.float32, (4, 6))
    whole = poison(torch.float32, (3, 4, 6))
    if rank == 0:
        whole[1] = source
    dist.broadcast(whole[1], src=0)
    check.equal(whole[1], source, "a row of a larger tensor")
    check.equal(whole[0], poison(torch.float32, (4, 6)), "the row before")
    check.equal(whole[2], poison(torch.float32, (4, 6)), "the row after")
    for turn in (lambda t: t.T, lambda t: t.reshape(2, 2, 6).permute(2, 0, 1)):
        turned = turn(source.clone()) if rank == 0 else turn(poison(torch.float32, (4, 6)))
        dist.broadcast(turned, 0)
        check.equal(turned, turn(source), "dense, not contiguous")
    image = draw(rng, torch.float32, (2, 3, 4, 5)).to(memory_format=torch.channels_last)
    tensor = image.clone() if rank == 0 else torch.zeros_like(image)
    dist.broadcast(tensor, 0)
    check.equal(tensor, image, "channels_last")
    check.done()


def test_numpy_and_buffers(rng):
    check, (rank, _) = Check(), here()
    for dtype in "? u1 i1 u2 i2 u4 i4 u8 i8 f2 f4 f8 c8 c16".split():
        source = (rng.standard_normal((3, 5)) * 50).astype(dtype)
        array = source.copy() if rank == 0 else np.zeros_like(source)
        dist.broadcast(array, 0)
        check.equal(array, source, f"NumPy {dtype}")
        turned = np.asfortranarray(source) if rank == 0 else np.zeros_like(source, order="F")
        dist.broadcast(turned, 0)
        check.equal(turned, source, f"NumPy {dtype} in Fortran order")
    data = bytearray(b"sent by rank 0") if rank == 0 else bytearray(14)
    dist.broadcast(data, 0)
    check.that(data == b"sent by rank 0", f"bytearray: {data}")
    data = memoryview(bytearray(b"abcd" if rank == 0 else b"...."))
    dist.broadcast(data, 0)
    check.that(data == b"abcd", "memoryview")
    check.done()


def test_an_array_and_a_tensor_meet(rng):
    """What is sent is elements of a dtype; ranks may hold them in different objects."""
    check, (rank, _) = Check(), here()
    source = draw(rng, torch.float64, 12)
    held = source.clone() if rank == 0 else np.zeros(12)
    dist.broadcast(held, 0)
    check.that(bool((torch.as_tensor(held) == source).all()), f"{held} for {source}")
    check.done()


def test_wrong_arguments():
    rank, size = here()
    for kwargs in ({"src": size}, {"src": -1}, {"group_src": size}, {}, {"src": 0, "group_src": 0}):
        with parallel_raises(ValueError):
            dist.broadcast(torch.zeros(1), **kwargs)
    with parallel_raises(ValueError):
        dist.broadcast(torch.zeros(4, 4)[:, 1], 0)
    with parallel_raises(TypeError):
        dist.broadcast("text", 0)
    with parallel_raises(TypeError):
        dist.broadcast(torch.zeros(1), 0, group="world")


def test_groups_and_ranks(rng):
    """src is a rank of the world, group_src one of the group."""
    check, (rank, size) = Check(), here()
    group = dist.new_group(list(range(size)))
    source = draw(rng, torch.float32, 5)
    for kwargs in ({"src": size - 1}, {"group_src": size - 1}):
        tensor = source.clone() if rank == size - 1 else torch.zeros(5)
        dist.broadcast(tensor, group=group, **kwargs)
        check.equal(tensor, source, str(kwargs))
    dist.destroy_process_group(group)
    check.done()
