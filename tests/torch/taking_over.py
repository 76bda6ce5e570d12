"""Programs for stock torch that know nothing of hpcdist: what test_plugin.py starts.

    mpirun -n 2 python taking_over.py NAME

Every line of the output says what was checked; a wrong result is an exception.
"""

from __future__ import annotations

import inspect
import os
import sys
import time
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist


def say(*what: object) -> None:
    os.write(1, (" ".join(map(str, what)) + "\n").encode())


def work(group: dist.ProcessGroup | None = None) -> None:
    """Sums over a group, and the group's own class."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    x = torch.full((3,), rank + 1.0)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [size * (size + 1) / 2] * 3
    kind = type(group or dist.group.WORLD).__name__
    assert kind == ("BridgeGroup" if "HPCDIST_TAKE_OVER" in os.environ else "ProcessGroup"), kind


def untouched() -> None:
    """What the import itself has done."""
    loaded = [name for name in sys.modules if name.split(".")[0] in ("hpcdist", "mpi4py")]
    assert not loaded and "libmpi" not in open("/proc/self/maps").read(), loaded
    say("place", *(os.environ.get(n, "-") for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK")))


def backend(name: str) -> None:
    untouched()
    dist.init_process_group(**({"backend": name} if name else {}))
    work()
    pair = dist.new_group([0, 1])
    other = dist.new_group([0, 1], backend=name or "gloo", timeout=timedelta(seconds=50))
    for group in (pair, other):
        assert dist.get_backend(group) == (name or {pair: "undefined"}.get(group, "gloo"))
        work(group)
    if name == "gloo":
        dist.monitored_barrier()
    say("rank", dist.get_rank(), "says", dist.get_backend(), dist.get_backend_config())
    dist.destroy_process_group()
    dist.init_process_group(**({"backend": name} if name else {}))
    work()
    dist.destroy_process_group()


def answers() -> None:
    say(
        f"mpi {dist.is_mpi_available()}",
        f"cpu {dist.Backend.default_device_backend_map['cpu']}",
        f"device {dist.get_default_backend_for_device('cpu')}",
    )


def mesh() -> None:
    """A mesh starts torch.distributed itself, and makes groups of its own."""
    from torch.distributed.device_mesh import init_device_mesh

    grid = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    work(grid.get_group("b"))
    say("mesh is done")


def turned() -> None:
    """A group whose ranks are in another order; torch before 2.13 sorts all."""
    dist.init_process_group("gloo")
    kept = "sort_ranks" in inspect.signature(dist.new_group).parameters
    group = dist.new_group([1, 0], **({"sort_ranks": False} if kept else {}))
    rank, order = dist.get_rank(), [1, 0] if kept else [0, 1]
    assert dist.get_process_group_ranks(group) == order and order[group.rank()] == rank
    got = [torch.zeros(1) for _ in order]
    dist.all_gather(got, torch.tensor([float(rank)]), group=group)
    assert got == [torch.tensor([float(world)]) for world in order]
    dist.broadcast(came := torch.tensor([float(rank)]), 1, group=group)
    assert came.item() == 1.0
    if rank == 0:
        dist.send(came, group=group, group_dst=order.index(1))
    else:
        assert dist.recv(came, group=group, group_src=order.index(0)) == 0
    say("turned is done")


def timeouts() -> None:
    """torch's private function sets the timeout of a group, without a warning."""
    dist.init_process_group("gloo")
    group = dist.new_group()
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.14 has a public one
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.3), group)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=50))
    dist.barrier()
    if dist.get_rank():
        try:
            dist.barrier(group=group)
        except RuntimeError as error:
            assert "after 0.3" in str(error), error
    else:
        time.sleep(1.5)
    dist.barrier()
    say("timeouts is done")


def remote() -> None:
    """torch's RPC meets by env://, too."""
    from torch.distributed import rpc

    rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
    assert rpc.rpc_sync(f"worker{(rank + 1) % size}", max, args=(3, 4)) == 4
    rpc.shutdown()
    say("rpc is done")


def wrong_rank() -> None:
    """A rank that MPI contradicts."""
    try:
        dist.init_process_group("gloo", rank=0, world_size=2)
    except Exception as error:
        say(type(error).__name__, error)
        raise


def no_backend() -> None:
    dist.init_process_group(init_method="mpi://")
    say("backend", dist.get_backend_config())
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == dist.get_world_size()
    dist.destroy_process_group()


def _child(rank: int, name: str) -> None:
    dist.init_process_group(name, rank=rank, world_size=2)
    work()
    say("child", rank, "is done")
    dist.destroy_process_group()


def children(port: str) -> None:
    """The pattern of torch's tutorials: a program that starts its processes itself."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.multiprocessing.spawn(_child, ("gloo",), nprocs=2)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
