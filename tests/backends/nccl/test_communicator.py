"""The binding of NCCL: every operation, element type and kind of communicator, on the stand-in."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest
import standin
import torch

import hpcdist as dist
from hpcdist import _nccl, dtypes
from hpcdist._nccl import Communicator, Group
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.standin

#: ncclDataType_t -> torch's
TYPES = dict(
    enumerate(
        [
            torch.int8, torch.uint8, torch.int32, torch.uint32, torch.int64, torch.uint64,
            torch.float16, torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn,
            torch.float8_e5m2,
        ]
    )
)  # fmt: skip
INTS = range(6)
FLOAT8 = (_nccl.FLOAT8_E4M3, _nccl.FLOAT8_E5M2)
EPS = {
    _nccl.FLOAT16: 2**-10, _nccl.BFLOAT16: 2**-7, _nccl.FLOAT32: 1e-6, _nccl.FLOAT64: 1e-14,
    _nccl.FLOAT8_E4M3: 2**-3, _nccl.FLOAT8_E5M2: 2**-2,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _library():
    standin.load()


def share(data: bytes | None) -> bytes:
    """Rank 0's bytes on all ranks."""
    box = [data]
    dist.broadcast_object_list(box, 0)
    return box[0]


def connect(blocking: bool = True, timeout: float = 10.0) -> Communicator:
    rank = dist.get_rank()
    unique = share(_nccl.unique_id() if rank == 0 else None)
    return Communicator.init(unique, dist.get_world_size(), rank, blocking, timeout)


@pytest.fixture(scope="module", params=[True, False], ids=["blocking", "nonblocking"])
def comm(request, _process_group):
    if not dist.is_initialized():  # a test of another file has destroyed it
        dist.init_process_group()
    made = connect(request.param)
    yield made
    made.finalize(10.0)
    made.destroy()


@pytest.fixture(scope="module")
def stream():
    return standin.Stream()


def draw(rng, kind: int, n: int, of: int) -> list[torch.Tensor]:
    """What each rank holds: small integers, so that sums and products are exact in most types."""
    low = 0 if TYPES[kind] in (torch.uint8, torch.uint32, torch.uint64) else -2
    values = rng.integers(low, 3, (of, n)).astype(np.float64)
    if kind in EPS and kind not in FLOAT8:
        values += rng.standard_normal((of, n))
    return [torch.from_numpy(row).to(TYPES[kind]) for row in values]


def expected(parts: list[torch.Tensor], kind: int, op: int, factor: float = 1.0) -> np.ndarray:
    wide = np.float64 if kind in EPS else object
    rows = [part.to(torch.float64).numpy().astype(wide) * factor for part in parts]
    if kind not in EPS:
        rows = [np.array([int(value) for value in row], object) for row in rows]
    result = rows[0]
    for row in rows[1:]:
        result = {
            _nccl.PROD: np.multiply, _nccl.MAX: np.maximum, _nccl.MIN: np.minimum,
        }.get(op, np.add)(result, row)  # fmt: skip
    if op == _nccl.AVG:
        if kind in EPS:
            return result / len(parts)
        return np.array([int(np.trunc(value / len(parts))) for value in result], object)
    return result


def close(found: torch.Tensor, want: np.ndarray, kind: int, terms: int) -> bool:
    got = found.to(torch.float64).numpy()
    if kind not in EPS:
        return all(int(a) == int(b) for a, b in zip(got, want, strict=True))
    return bool(np.allclose(got, want, rtol=4 * EPS[kind] * terms, atol=8 * EPS[kind] * terms))


def poisoned(kind: int, n: int) -> torch.Tensor:
    out = torch.empty(n, dtype=TYPES[kind])
    out.view(torch.uint8).fill_(0x5A)
    return out


def test_all_reduce_of_every_type_and_operation(comm, stream, rng):
    wrong = []
    for kind, op in itertools.product(TYPES, range(5)):
        n = 20_001 if (kind, op) == (_nccl.FLOAT32, _nccl.SUM) else int(rng.integers(1, 300))
        parts = draw(rng, kind, n, comm.size)
        want = expected(parts, kind, op)
        # into another place, and then in place
        out, own = poisoned(kind, n), parts[comm.rank]
        comm.all_reduce(own.data_ptr(), out.data_ptr(), n, kind, op, stream.handle)
        comm.all_reduce(own.data_ptr(), own.data_ptr(), n, kind, op, stream.handle)
        stream.synchronize()
        if not (close(out, want, kind, comm.size) and close(own, want, kind, comm.size)):
            wrong.append((TYPES[kind], op, n, out[:4], want[:4]))
    parallel_assert(not wrong, lambda: f"{len(wrong)} wrong, first {wrong[0]}")


def test_premul_sum(comm, stream, rng):
    wrong = []
    kinds = [_nccl.FLOAT16, _nccl.BFLOAT16, _nccl.FLOAT32, _nccl.FLOAT64]
    for kind, factor in itertools.product(kinds, (0.75, 0.1, -3.0)):
        parts = draw(rng, kind, 301, comm.size)
        out = poisoned(kind, 301)
        op = comm.premul_sum(factor, kind)
        parallel_assert(op == comm.premul_sum(factor, kind), "not made twice")
        comm.all_reduce(parts[comm.rank].data_ptr(), out.data_ptr(), 301, kind, op, stream.handle)
        stream.synchronize()
        if not close(out, expected(parts, kind, 0, factor), kind, 3 * comm.size):
            wrong.append((TYPES[kind], factor))
    parallel_assert(not wrong, lambda: str(wrong))
    for number in range(100):  # the oldest are destroyed
        comm.premul_sum(1.0 + number, _nccl.FLOAT32)
    with parallel_raises(TypeError, match="floats only"):
        comm.premul_sum(2.0, _nccl.INT32)


def test_reduce_broadcast_and_reduce_scatter(comm, stream, rng):
    wrong = []
    for kind, root, n in itertools.product(TYPES, {comm.size - 1}, (5, 20_001)):
        if n > 5 and kind not in (_nccl.FLOAT32, _nccl.INT64):
            continue
        parts = draw(rng, kind, n, comm.size)
        whole = draw(rng, kind, n * comm.size, comm.size)
        own, mine = parts[comm.rank], whole[comm.rank]
        out, part, copy = (poisoned(kind, n) for _ in range(3))
        comm.reduce(own.data_ptr(), out.data_ptr(), n, kind, _nccl.SUM, root, stream.handle)
        comm.broadcast(own.data_ptr(), copy.data_ptr(), n, kind, root, stream.handle)
        comm.reduce_scatter(mine.data_ptr(), part.data_ptr(), n, kind, _nccl.MAX, stream.handle)
        stream.synchronize()
        here = slice(n * comm.rank, n * (comm.rank + 1))
        reduced = expected([each[here] for each in whole], kind, _nccl.MAX)
        good = torch.equal(copy.view(torch.uint8), parts[root].view(torch.uint8))
        good &= close(part, reduced, kind, comm.size)
        if comm.rank == root:
            good &= close(out, expected(parts, kind, _nccl.SUM), kind, comm.size)
        else:
            good &= bool((out.view(torch.uint8) == 0x5A).all())
        if not good:
            wrong.append((TYPES[kind], root, n))
    parallel_assert(not wrong, lambda: str(wrong))


def test_what_moves(comm, stream, rng):
    wrong = []
    size, rank, root = comm.size, comm.rank, comm.size - 1
    for kind, n in itertools.product(TYPES, (5, 20_001)):
        if n > 5 and kind not in (_nccl.FLOAT32, _nccl.INT8):
            continue
        sent = draw(rng, kind, n * size, size)
        out, mine = [poisoned(kind, n * size) for _ in range(3)], poisoned(kind, n)
        own = sent[rank].data_ptr()
        comm.all_gather(own, out[0].data_ptr(), n, kind, stream.handle)
        comm.all_to_all(own, out[1].data_ptr(), n, kind, stream.handle)
        comm.gather(own, out[2].data_ptr(), n, kind, root, stream.handle)
        comm.scatter(own, mine.data_ptr(), n, kind, root, stream.handle)
        stream.synchronize()
        heads = torch.cat([each[:n].view(torch.uint8) for each in sent])
        mixed = torch.cat([each[n * rank : n * (rank + 1)].view(torch.uint8) for each in sent])
        good = torch.equal(out[0].view(torch.uint8), heads)
        good &= torch.equal(out[1].view(torch.uint8), mixed)
        if rank == root:
            good &= torch.equal(out[2].view(torch.uint8), heads)
        part = sent[root][n * rank : n * (rank + 1)]
        good &= torch.equal(mine.view(torch.uint8), part.view(torch.uint8))
        if not good:
            wrong.append((TYPES[kind], n))
    parallel_assert(not wrong, lambda: str(wrong))


def test_messages_in_a_group(comm, stream, rng):
    n = 30_001
    sent = draw(rng, _nccl.INT64, n, comm.size)
    out = [poisoned(_nccl.INT64, n) for _ in range(comm.size)]
    with Group(comm):
        for peer in range(comm.size):
            comm.send(sent[comm.rank].data_ptr(), n, _nccl.INT64, peer, stream.handle)
        for peer in range(comm.size):
            comm.recv(out[peer].data_ptr(), n, _nccl.INT64, peer, stream.handle)
    stream.synchronize()
    parallel_assert(all(torch.equal(a, b) for a, b in zip(out, sent, strict=True)))
    # without a group: around a ring, first one half and then the other
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if comm.size > 1:
        out[left].zero_()
        own = sent[comm.rank].data_ptr()
        if comm.rank % 2:
            comm.recv(out[left].data_ptr(), n, _nccl.INT64, left, stream.handle)
        comm.send(own, n, _nccl.INT64, right, stream.handle)
        if not comm.rank % 2:
            comm.recv(out[left].data_ptr(), n, _nccl.INT64, left, stream.handle)
        stream.synchronize()
    parallel_assert(torch.equal(out[left], sent[left]))


def test_a_stream_is_asynchronous(comm, stream, rng):
    # what is not waited for is not there: the test that a missing wait would not survive
    data = torch.ones(8, dtype=torch.float32)
    stream.kernel(0.1)
    comm.all_reduce(data.data_ptr(), data.data_ptr(), 8, _nccl.FLOAT32, _nccl.SUM, stream.handle)
    early = data.clone()
    stream.synchronize()
    parallel_assert(bool((early == 1).all()), "the operation did not wait for its stream")
    parallel_assert(bool((data == comm.size).all()))


def test_split(comm, stream):
    rank, size = comm.rank, comm.size
    halves = comm.split(rank % 2, -rank, timeout=10.0)
    members = sorted(range(rank % 2, size, 2), reverse=True)
    parallel_assert((halves.size, halves.rank) == (len(members), members.index(rank)))
    data = torch.tensor([rank], dtype=torch.int64)
    halves.all_reduce(data.data_ptr(), data.data_ptr(), 1, _nccl.INT64, _nccl.SUM, stream.handle)
    stream.synchronize()
    parallel_assert(data.item() == sum(members))
    halves.destroy()
    some = comm.split(0 if rank == 0 else -1, 0, timeout=10.0)
    parallel_assert((some is None) == (rank != 0))
    if some is not None:
        some.destroy()


def test_shrink(comm, stream):
    last = comm.size - 1
    if comm.size == 1 or comm.rank == last:
        with pytest.raises(ValueError, match="cannot leave out"):
            comm.shrink([comm.rank])
    else:
        left = comm.shrink([last], timeout=10.0)
        data = torch.tensor([1], dtype=torch.int32)
        left.all_reduce(data.data_ptr(), data.data_ptr(), 1, _nccl.INT32, _nccl.SUM, stream.handle)
        stream.synchronize()
        assert (left.size, left.rank, data.item()) == (last, comm.rank, last)
        left.destroy()
    dist.barrier()


def test_the_end_of_a_communicator():
    made = connect()
    made.finalize()
    parallel_assert(made.state == "finalized")
    with parallel_raises(dist.DistBackendError, match="has been finalized"):
        made.broadcast(0, 0, 0, _nccl.INT8, 0, 0)
    made.destroy()
    made.destroy()
    parallel_assert(made.state == "destroyed" and made.handle == 0)
    other = connect(blocking=False)
    other.abort()
    with parallel_raises(dist.DistBackendError, match="has been aborted"):
        other.broadcast(0, 0, 0, _nccl.INT8, 0, 0)


def test_errors_say_what_nccl_says():
    with parallel_raises(ValueError, match="128 bytes, not 3"):
        Communicator.init(b"abc", 1, 0)
    with parallel_raises(dist.DistBackendError, match=r"ncclInvalidArgument, 4.*is not valid"):
        Communicator.init(bytes(128), 1, 0)
    comm = connect()
    with parallel_raises(dist.DistBackendError, match=r"ncclAllReduce .*there is no type 99"):
        comm.all_reduce(1, 1, 1, 99, 0, 0)
    with standin.fault(f"fail:{comm.size - 1}:1"):
        if comm.rank == comm.size - 1:
            with pytest.raises(dist.DistBackendError, match=r"ncclInternalError, 3.*asked for"):
                comm.broadcast(1, 1, 0, _nccl.INT8, 0, 0)
    dist.barrier()
    comm.abort()


def test_a_rank_that_does_not_come(monkeypatch):
    rank, size = dist.get_rank(), dist.get_world_size()
    unique = share(_nccl.unique_id() if rank == 0 else None)
    # one more than there are
    with parallel_raises(dist.DistTimeoutError, match="another rank has not arrived"):
        Communicator.init(unique, size + 1, rank, blocking=False, timeout=0.3)


@pytest.mark.mpi(min_size=2)
def test_two_ranks_on_one_gpu(monkeypatch):
    monkeypatch.setenv("NCCL_STANDIN_BUS", "1b000")
    with parallel_raises(
        dist.DistBackendError, match=r"(?s)ncclInvalidUsage.*Duplicate GPU.*give each its own"
    ):
        connect()


@pytest.mark.mpi(min_size=2)
def test_a_mismatch_a_failed_peer_and_an_abort(stream):
    data = torch.ones(4)
    comm = connect()
    comm.all_reduce(
        data.data_ptr(), data.data_ptr(), 4 - (comm.rank == 0), _nccl.FLOAT32, _nccl.SUM, 0
    )
    standin.Stream(0).synchronize()
    parallel_assert("rank 0" in str(comm.async_error()), lambda: str(comm.async_error()))
    with parallel_raises(dist.DistBackendError):
        comm.broadcast(1, 1, 0, _nccl.INT8, 0, 0)
    comm.abort()
    # rank 1 hangs until it aborts; the others hear of it
    comm = connect()
    with standin.fault("hang:1:1"):
        comm.all_reduce(data.data_ptr(), data.data_ptr(), 4, _nccl.FLOAT32, _nccl.SUM, 0)
        if comm.rank == 1:
            comm.abort()
    standin.Stream(0).synchronize()
    if comm.rank != 1:
        assert isinstance(comm.async_error(), dist.RankFailedError), comm.async_error()
        left = comm.shrink([1], abort=True)
        assert left.size == comm.size - 1
        left.destroy()
        comm.abort()
    dist.barrier()


def test_what_nccl_takes_of_hpcdist():
    for code, dtype in enumerate(dtypes.DTYPES):
        kind, lanes = _nccl.movement(code)
        assert _nccl.ITEMSIZES[kind] * lanes == dtype.itemsize, dtype
        for op in dtype.ops:
            number = dist.ReduceOp(op).code
            none = op in ("BAND", "BOR", "BXOR") and dtype.kind != "bool"
            none |= (dtype.name, op) == ("bool", "BXOR") or dtype.name in ("int16", "uint16")
            if none:
                with pytest.raises(TypeError, match="NCCL"):
                    _nccl.reduction(code, number)
                continue
            kind, lanes, how = _nccl.reduction(code, number)
            assert _nccl.ITEMSIZES[kind] * lanes == dtype.itemsize, dtype
            assert (how < 0) == (op == "PREMUL_SUM")
    with pytest.raises(TypeError, match="complex numbers have"):
        _nccl.reduction(dtypes.lookup("complex64").code, dist.ReduceOp.MAX.code)


def test_memory_is_registered(comm):
    data = torch.ones(16)
    comm.deregister(comm.register(data.data_ptr(), data.nbytes))
    with parallel_raises(dist.DistBackendError, match="nothing to register"):
        comm.register(0, 0)


def test_what_is_newer_than_the_floor(stream):
    size, rank = dist.get_world_size(), dist.get_rank()
    # several places to meet
    own = share(_nccl.unique_id() if rank == 0 else None)
    comm = Communicator.init([own] * size, size, rank, timeout=10.0)
    place = _nccl.mem_alloc(64)
    window = comm.window_register(place, 64, symmetric=True)
    data = torch.ones(16)
    comm.all_reduce(data.data_ptr(), place, 16, _nccl.FLOAT32, _nccl.SUM, stream.handle)
    stream.synchronize()
    found = np.ctypeslib.as_array((ctypes.c_float * 16).from_address(place))
    parallel_assert(bool((found == size).all()))
    comm.window_deregister(window)
    _nccl.mem_free(place)
    with parallel_raises(dist.DistBackendError, match="nothing|no memory"):
        _nccl.mem_alloc(0)
    with parallel_raises(dist.DistBackendError, match="no window"):
        comm.window_register(0, 0)
    comm.revoke()
    with parallel_raises(dist.DistBackendError, match="was revoked"):
        comm.all_reduce(1, 1, 1, _nccl.FLOAT32, _nccl.SUM, 0)
    comm.abort()
    with parallel_raises(ValueError, match="no ncclUniqueId"):
        Communicator.init([], 1, 0)
