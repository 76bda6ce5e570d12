"""Stock torch.distributed with tensors on a GPU, on the stand-in: what moves them, and how.

mpirun -n 3 python bridge_cuda.py
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

os.environ["HPCDIST_CUDA_CHUNK"] = "4096"

import standin  # noqa: E402
import torch  # noqa: E402
import torch.distributed as td  # noqa: E402
from standin import cpu, gpu  # noqa: E402

import hpcdist  # noqa: E402
import hpcdist.torch  # noqa: E402
from hpcdist.backends import cuda as device  # noqa: E402

N = 10_000
LIMIT = timedelta(seconds=20)


class Runtime(standin.Runtime):
    """Notes for which devices it was asked for futures."""

    promised: list[int]

    def promise(self, index: int) -> Any:
        self.promised.append(index)
        return super().promise(index)


def every_operation(put: Any) -> None:
    """Each operation of torch's on tensors that `put` makes; what all ranks must find."""
    rank, size = td.get_rank(), td.get_world_size()
    total, n = sum(range(1, size + 1)), 2 * size

    def own() -> torch.Tensor:
        return put(torch.full((n,), float(rank + 1)))

    def holds(tensor: torch.Tensor, wanted: Any) -> None:
        found = cpu(tensor)
        assert bool((found == torch.as_tensor(wanted, dtype=found.dtype)).all()), (found, wanted)

    td.all_reduce(data := own())
    holds(data, total)
    work = td.all_reduce(data := own(), op=td.ReduceOp.MAX, async_op=True)
    assert work.wait()
    holds(data, size)
    td.broadcast(data := own(), 1)
    holds(data, 2)
    td.reduce(data := own(), 0)
    if rank == 0:  # gloo writes to the others' as well
        holds(data, total)
    outs = [put(torch.zeros(n)) for _ in range(size)]
    td.all_gather(outs, own())
    for place, each in enumerate(outs):
        holds(each, place + 1)
    td.all_gather_into_tensor(whole := put(torch.zeros(n * size)), own())
    holds(whole, torch.arange(1, size + 1).repeat_interleave(n))
    td.gather(own(), outs if rank == 0 else None, 0)
    td.scatter(data := put(torch.zeros(n)), outs if rank == 0 else None, 0)
    holds(data, rank + 1)
    td.reduce_scatter_tensor(data := put(torch.zeros(n)), whole)
    holds(data, (rank + 1) * size)
    td.reduce_scatter(data := put(torch.zeros(n)), outs)
    td.all_to_all_single(out := put(torch.zeros(n)), own())
    holds(out, torch.arange(1, size + 1).repeat_interleave(2))
    after, before = (rank + 1) % size, (rank - 1) % size
    big = put(torch.full((N,), float(rank)))
    batch = [td.P2POp(td.isend, big, after),
             td.P2POp(td.irecv, back := put(torch.zeros(N)), before)]  # fmt: skip
    for each in td.batch_isend_irecv(batch):
        each.wait()
    holds(back, before)


def on_the_host(runtime: Runtime) -> None:
    """Another backend of torch's for one device, hpcdist's for the other."""
    td.init_process_group("cpu:gloo,cuda:hpcdist", init_method="mpi://", timeout=LIMIT)
    group = hpcdist.torch.group()
    before = group._backends["cpu"].seq
    every_operation(torch.clone)
    assert group._backends["cpu"].seq == before, "gloo was to move tensors of the host"
    other = td.group.WORLD._get_backend(torch.device("cpu"))
    assert type(other).__name__ == "ProcessGroupGloo", other
    assert td.group.WORLD._get_backend(torch.device("cuda")) is td.group.WORLD
    every_operation(gpu)
    found: list[Any] = [None] * td.get_world_size()
    td.all_gather_object(found, {"rank": td.get_rank()})
    assert [each["rank"] for each in found] == list(range(td.get_world_size()))
    half = td.new_group([0, 1])
    part = td.group.WORLD.split_group([0, 1], LIMIT, None, "half")
    if td.get_rank() < 2:
        for pg in (half, part):
            assert type(pg._get_backend(torch.device("cpu"))).__name__ == "ProcessGroupGloo"
            for put in (torch.clone, gpu):
                works = [pg.allreduce([data := put(torch.ones(5))])]
                works[0].wait()
                assert bool((cpu(data) == 2).all())
        part.shutdown()
    started_together(td.group.WORLD)
    td.destroy_process_group()
    assert not hpcdist.is_initialized()


def started_together(group: Any) -> None:
    """A batch for a backend that starts messages together, as NCCL does, is one for it."""
    calls: list[str] = []
    work = SimpleNamespace(wait=lambda: True)
    other = SimpleNamespace(
        _get_backend=lambda device: SimpleNamespace(supports_coalescing=True),
        _start_coalescing=lambda device: calls.append("start"),
        _end_coalescing=lambda device: calls.append("end") or work,
        send=lambda *args: calls.append("send"),
        recv=lambda *args: calls.append("recv"),
    )
    name = group._elsewhere.names["cpu"]
    real, group._elsewhere._made[name] = group._elsewhere._made[name], other
    try:
        peer, data = (td.get_rank() + 1) % td.get_world_size(), torch.ones(3)
        for count in (2, 4):
            batch = [td.P2POp(op, data, peer) for op in (td.isend, td.irecv)] * (count // 2)
            assert td.batch_isend_irecv(batch) == [work]
            assert calls == ["start", *["send", "recv"] * (count // 2), "end"], calls
            calls.clear()
        td.isend(data, peer)
        assert calls == ["send"], calls
    finally:
        group._elsewhere._made[name] = real


def on_the_gpu(runtime: Runtime, options: Any, kind: str) -> None:
    """hpcdist alone: as its own default group has it."""
    hpcdist.torch.init_process_group(pg_options=options, timeout=LIMIT)
    rank, size = td.get_rank(), td.get_world_size()
    assert type(hpcdist.torch.group()._backends["cuda"]).__name__ == kind
    assert td.group.WORLD._device_types == [torch.device("cpu"), torch.device("cuda")]
    every_operation(torch.clone)
    every_operation(gpu)
    assert td.group.WORLD._elsewhere is None
    # messages with tags, and from any rank
    if rank == 0:
        for tag in (1, 2):
            td.send(gpu(torch.full((N,), float(tag))), 1, tag=tag)
    elif rank == 1:
        for tag, source in ((1, 0), (2, None)):
            assert td.recv(data := gpu(torch.zeros(N)), source, tag=tag) == 0
            assert bool((cpu(data) == tag).all())
    # the caller's stream waits for the operation, and the operation for the caller's stream
    stream, ones = standin.Stream(), torch.ones(N)
    with standin.on(stream):
        data, copy = gpu(torch.zeros(N)), torch.zeros(N)
        stream.kernel(0.05, data.data_ptr(), ones.data_ptr(), data.nbytes)
        work = td.all_reduce(data, async_op=True)
        assert not work.is_completed()
        work.wait()
        stream.kernel(0.0, copy.data_ptr(), data.data_ptr(), copy.nbytes)
        stream.synchronize()
    assert bool((copy == size).all()) and work.is_success() and work.exception() is None
    # futures know the device of what they hold
    runtime.promised.clear()
    outs = [gpu(torch.zeros(3)) for _ in range(size)]
    future = td.all_gather(outs, gpu(torch.full((3,), float(rank))), async_op=True).get_future()
    rows = future.wait()[0].as_subclass(torch.Tensor)
    assert rows.tolist() == [[float(r)] * 3 for r in range(size)] and 0 in runtime.promised
    later = td.all_reduce(gpu(torch.ones(3)), async_op=True).get_future()
    assert bool((later.then(lambda f: f.value()[0] * 2).wait() == 2 * size).all())
    runtime.promised.clear()
    td.all_reduce(torch.ones(3), async_op=True).get_future().wait()
    assert not runtime.promised, "the host's tensors need no stream"
    td.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)
    standin.load()
    runtime = Runtime()
    runtime.promised = []
    device.use(runtime)
    on_the_host(runtime)
    on_the_gpu(runtime, None, "NcclGroup")
    on_the_gpu(runtime, hpcdist.MPIOptions(), "StagedGroup")
    print("well", flush=True)


if __name__ == "__main__":
    main()
