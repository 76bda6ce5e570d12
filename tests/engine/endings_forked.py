"""The programs of test_endings.py that fork."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time

import numpy as np
from ending_parts import others_wait, say
from patience import patience

import hpcdist as dist


def forked(rank: int) -> None:
    """A forked child is told at once; the parent goes on."""
    child = os.fork()
    if child == 0:
        began = time.monotonic()
        try:
            dist.all_reduce(np.ones(3, np.float32))
        except dist.DistError as error:
            if time.monotonic() - began < patience() and "fork" in str(error):
                say("child told")
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    others_wait()
    say(f"rank {rank} went on")


def forked_handles(rank: int) -> None:
    """A child uses every public name of what it inherited, while messages for its parent come."""
    data = [np.zeros(n, np.int32) for n in (5, 5000) * 20]
    dist.barrier()
    if rank == 1:
        time.sleep(0.2)
        for number, box in enumerate(data):
            dist.send(np.full_like(box, number), 0)
        say("went on")
        return
    works = [dist.irecv(box, 1) for box in data]
    child = os.fork()
    if not child:
        told, until = set(), time.monotonic() + 1
        comm = dist.group.WORLD.carrier
        while time.monotonic() < until:
            for thing in (works[0], works[1], comm):
                for name in dir(type(thing)):
                    if name.startswith("_") and name != "__repr__":
                        continue
                    try:
                        found = getattr(thing, name)
                        if callable(found):
                            found()
                    except dist.DistError:
                        told.add(name)
                    except (TypeError, ValueError):
                        pass  # of a call without its arguments
        names = {"wait", "is_completed", "is_success", "exception", "source_rank", "cancel"}
        say("child told" if told >= {*names, "get_future", "barrier"} else f"only {told}")
        os._exit(0)
    os.waitpid(child, 0)
    for work in works:
        work.wait()
    if all((box == number).all() for number, box in enumerate(data)):
        say("went on")


def child_of_multiprocessing() -> None:
    """Use hpcdist where it must not be used, and leave as multiprocessing does, by sys.exit."""
    for call in (
        lambda: dist.all_reduce(np.ones(3, np.float32)),
        dist.barrier,
        lambda: dist.isend(np.ones(1, np.float32), 0),
        lambda: dist.all_gather_object([None] * 4, 1),
        lambda: dist.new_group([dist.get_rank()]),
        dist.init_process_group,
    ):
        began = time.monotonic()
        try:
            call()
        except (dist.DistError, ValueError) as error:
            say(f"child told after {time.monotonic() - began:.3f} s: {type(error).__name__}")
    sys.exit(0)


def multiprocessing_fork(rank: int) -> None:
    """Children of multiprocessing's fork are told at once; the parent, with a lane, goes on."""
    work = dist.all_reduce(
        np.ones(3, np.float32), async_op=True
    )  # there is a lane's thread to lose
    work.wait()
    children = [
        multiprocessing.get_context("fork").Process(target=child_of_multiprocessing)
        for _ in range(2)
    ]
    for child in children:
        child.start()
    for child in children:
        dist.all_reduce(np.ones(1000, np.float32))
        child.join(20)
        assert child.exitcode == 0, child.exitcode
    dist.all_reduce(np.ones(1000, np.float32), async_op=True).wait()
    say(f"rank {rank} went on")


class Numbers:
    """Data whose loading in a forked worker finds out that hpcdist cannot be used there."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int):
        import torch

        if torch.utils.data.get_worker_info() is not None and index % 16 == 0:
            try:
                dist.barrier()
                return torch.full((4,), float("nan"))
            except dist.DistError:
                pass
        return torch.randn(4, generator=torch.Generator().manual_seed(index))


def data_loader(rank: int) -> None:
    """DDP trains while two forked workers load the data."""
    import torch

    dataset = Numbers()
    sampler = dist.DistributedSampler(dataset)
    loader = torch.utils.data.DataLoader(
        dataset, 4, sampler=sampler, num_workers=2, multiprocessing_context="fork"
    )
    model = dist.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    steps = 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in loader:
            loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            assert loss.isfinite(), loss
            steps += 1
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    every = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(every, flat)
    assert all(torch.equal(each, flat) for each in every)
    say(f"rank {rank} trained {steps} steps")
