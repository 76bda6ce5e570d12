"""What test_bridge.py starts with HPCDIST_NAN_CHECK: a NaN on one rank, in stock torch's calls."""

from __future__ import annotations

import torch
import torch.distributed as td

import hpcdist
import hpcdist.torch


def raises(call, kind: type[Exception] = hpcdist.DistNaNError) -> None:
    """Make a call that has to raise that error, at once or when it is waited for.

    Rank 1 refuses without waiting, and the others know its last reasons only: so it waits for them.
    """
    try:
        work = call()
        if work is not None:
            work.wait()
    except kind as error:
        assert "rank 1 refused" in str(error) or td.get_rank() == 1, error
        assert "NaN at element" in str(error) and "bridge_nans.py:" in str(error), error
    else:
        raise AssertionError("no error")
    td.barrier()


def main() -> None:
    hpcdist.torch.init_process_group()
    rank, size = td.get_rank(), td.get_world_size()
    x = torch.ones(6)
    x[4] = float("nan") if rank == 1 else 1.0
    for later in (False, True):
        raises(lambda later=later: td.all_reduce(x, async_op=later))
        raises(lambda later=later: td.broadcast(x, 1, async_op=later))
        raises(
            lambda later=later: td.all_gather([x.clone() for _ in range(size)], x, async_op=later)
        )
        raises(lambda later=later: td.all_to_all_single(torch.ones(6), x, async_op=later))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
    # torch makes an error of its own of what a future contains
    raises(lambda: model(x.view(2, 3)).sum().backward(), RuntimeError)
    total = torch.ones(2)
    td.all_reduce(total)
    assert total.tolist() == [size] * 2
    print("well", flush=True)
    td.destroy_process_group()


if __name__ == "__main__":
    main()
