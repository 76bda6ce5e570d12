"""The programs that test_endings.py starts under mpirun: each ends in one unhappy way on rank 1.

    mpirun -n 2 python endings.py NAME

They print `in time` lines for what the tests measure, and nothing they do may hang. NumPy's arrays
do for most: a job without torch starts in a fourth of the time.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import numpy as np

import hpcdist as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from jobs import mapped_shm  # noqa: E402


def say(text: str) -> None:
    """Print a line in one piece: print() would write text and newline apart, and ranks mix."""
    os.write(1, f"{text}\n".encode())


def others_wait(idle: bool = False) -> None:
    """What the ranks do that are not at fault: a collective, or computing for long."""
    if idle:
        time.sleep(120)
    dist.all_reduce(np.ones(3, np.float32))


def exception(rank: int, *how: str) -> None:
    if rank == 1:
        raise ValueError("boom")
    others_wait("idle" in how)


def sys_exit(rank: int, *how: str) -> None:
    if rank == 1:
        sys.exit(3)
    others_wait("idle" in how)


def os_exit(rank: int, *how: str) -> None:
    if rank == 1:
        os._exit(0)
    others_wait("idle" in how)


def killed(rank: int, *how: str) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    others_wait("idle" in how)


def terminated(rank: int, *how: str) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    others_wait("idle" in how)


def ended_while_sharing(rank: int) -> None:
    """As if between the making of a file of shared memory and the end of its name."""
    if rank == 1:
        name = f"hpcdist-{os.getpid()}-0123456789abcdef"
        Path("/dev/shm", name).touch()
        say(f"shm {name}")
        os._exit(0)
    others_wait()


def killed_at_work(rank: int, victim: str, after: str) -> None:
    """All ranks reduce tensors of all sizes without a pause; one is killed at some moment."""
    if rank == int(victim):

        def kill() -> None:
            time.sleep(float(after))
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=kill, daemon=True).start()
    tensors = [np.zeros(n, np.float32) for n in (1, 3, 1000, 100_000, 4_000_000)]
    while True:
        for tensor in tensors:
            dist.all_reduce(tensor)


def unhandled_ctrl_c(rank: int, where: str) -> None:
    """Ctrl-C on rank 1 that nobody handles, while all of them wait for something."""
    if rank == 1:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    if where == "collective":
        if rank == 1:
            dist.all_reduce(np.ones(3, np.float32))
        time.sleep(120)
    elif where == "wait":
        if rank == 1:
            dist.all_reduce(np.ones(3, np.float32), async_op=True).wait()
        time.sleep(120)
    elif where == "lane":  # the operation is in the lane, the main thread computes
        if rank == 1:
            work = dist.all_reduce(np.ones(3, np.float32), async_op=True)
            while not work.is_completed():
                sum(range(1000))
        time.sleep(120)


def interrupted(rank: int, where: str) -> None:
    """Ctrl-C on rank 0 in a call that rank 1 does not join until later; then both go on."""
    tensor = np.ones(3, np.float32)
    if rank == 0:
        sent = []

        def press() -> None:
            time.sleep(0.5)
            sent.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=press).start()
        try:
            if where == "recv":
                dist.recv(tensor, 1)
            elif where == "wait":
                work = dist.all_reduce(tensor, async_op=True)
                work.wait()
            elif where == "lane":  # a synchronous call that queues behind what the lane does
                work = dist.all_reduce(tensor, async_op=True)
                dist.all_reduce(np.ones(1, np.float32))
            elif where == "busy":  # the lane works, the main thread runs Python
                work = dist.all_reduce(tensor, async_op=True)
                while True:
                    sum(range(1000))
            else:
                dist.all_reduce(tensor)
        except KeyboardInterrupt:
            say(f"interrupted after {time.monotonic() - sent[0]:.3f} s")
    else:
        time.sleep(1.5)
        if where == "collective":
            try:
                dist.all_reduce(tensor)
            except dist.DistTimeoutError as error:
                say(f"late: {error}")
        elif where in ("wait", "lane", "busy"):
            dist.all_reduce(tensor, async_op=True).wait()
            if where == "lane":
                dist.all_reduce(np.ones(1, np.float32))
    if where in ("wait", "lane", "busy") and rank == 0:
        work.wait()
        assert tensor.tolist() == [2, 2, 2]
    last = np.ones(2, np.float32)
    dist.all_reduce(last)
    assert last.tolist() == [2, 2]
    say(f"rank {rank} went on")


def outstanding(rank: int) -> None:
    """Operations in flight at the end that everybody has started: they complete."""
    dropped = [dist.all_reduce(np.ones(1000, np.float32), async_op=True) for _ in range(20)]
    del dropped
    if rank == 0:
        dist.isend(np.ones(4, np.float32), 1)
    else:
        dist.irecv(np.ones(4, np.float32), 0)
    say(f"rank {rank} ends")


def forgotten(rank: int) -> None:
    """Rank 0 ends with a collective in flight that rank 1 never starts; rank 1 stays for long."""
    if rank == 0:
        dist.all_reduce(np.ones(3, np.float32), async_op=True)
    else:
        time.sleep(120)


def unseen(rank: int) -> None:
    """An operation fails and nobody looks at its Work."""
    if rank == 0:
        dist.all_reduce(np.ones(3, np.float32), async_op=True)
        time.sleep(1)


def forked(rank: int) -> None:
    """A forked child is told at once; the parent goes on."""
    child = os.fork()
    if child == 0:
        began = time.monotonic()
        try:
            dist.all_reduce(np.ones(3, np.float32))
        except dist.DistError as error:
            if time.monotonic() - began < 0.1 and "fork" in str(error):
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
        comm = dist.group.WORLD._comm
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


def in_backward(rank: int, how: str) -> None:
    """Rank 1 fails in the middle of DDP's backward pass; the other's ends with an error."""
    import torch

    torch.set_num_threads(1)
    layers = [torch.nn.Linear(8, 8) for _ in range(3)]
    model = dist.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0)
    x = torch.ones(2, 8)
    model(x).sum().backward()

    def fail(_gradient: torch.Tensor) -> None:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("boom")

    loss = model(x).sum()
    dist.barrier()
    if rank == 0:
        say(f"began {time.time():.3f}")
    if rank == 1:
        layers[1].weight.register_hook(fail)
    try:
        loss.backward()
    except dist.DistError as error:
        say(f"rank {rank} backward: {type(error).__name__}: {error}")
        try:
            model(x)
        except dist.DistError as again:
            say(f"rank {rank} forward: {again}")
        raise


def ends_anyhow(rank: int, *states: str) -> None:
    """The interpreter ends in some state of the library; whatever it is, nothing may crash."""
    if "destroyed" in states:
        dist.destroy_process_group()
    if "groups" in states:
        dist.new_group()
        dist.new_group([rank])
    if "futures" in states:
        future = dist.all_reduce(np.ones(5, np.float32), async_op=True).get_future()
        future.then(lambda f: time.sleep(0.2))
    if "cycle" in states:
        work = dist.all_reduce(np.ones(5, np.float32), async_op=True)
        loop = [work]
        loop.append(loop)
    if "thread" in states:

        def reduce_on() -> None:
            group = dist.new_group()
            for _ in range(50):
                dist.all_reduce(np.ones(5, np.float32), group=group)

        threading.Thread(target=reduce_on).start()
    if "atexit" in states:
        import atexit

        atexit.register(lambda: dist.all_reduce(np.ones(5, np.float32)))
    if "del" in states:
        holder = type("Holder", (), {"__del__": lambda self: dist.is_initialized()})()
        sys.modules["holder"] = holder
    if "many" in states:
        sys.modules["works"] = [
            dist.all_reduce(np.ones(2, np.float32), async_op=True) for _ in range(1000)
        ]
    say(f"rank {rank} ends")


def ends_with_messages(rank: int, how: str) -> None:
    """Ends while receives are unmatched, a thread waits for a message, or a callback runs."""
    other = 1 - rank
    if how == "callback":
        work = dist.irecv(np.zeros(1, np.float32), rank)
        slow = work.get_future()
        slow.then(lambda _: [time.sleep(0.01) for _ in range(50)])
        dist.isend(np.ones(1, np.float32), rank)
        time.sleep(0.1)
    elif how == "thread":
        wait = threading.Thread(
            target=dist.recv, args=(np.zeros(1, np.float32), other), daemon=True
        )
        wait.start()
        time.sleep(0.1)
    else:
        for _ in range(20):
            dist.irecv(np.zeros(1, np.float32), other)
    say("ends")


def stopped(rank: int) -> None:
    """Rank 1 is stopped (SIGSTOP) for a while; rank 0 names it in time."""
    if rank == 1:
        child = os.fork()
        if child == 0:  # wakes its parent up later
            time.sleep(4)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
        os.waitpid(child, 0)
    dist.group.WORLD._comm.timeout = 2.5
    began = time.monotonic()
    try:
        dist.barrier()
    except dist.DistTimeoutError as error:
        say(f"rank {rank} after {time.monotonic() - began:.1f} s: {error}")
    dist.group.WORLD._comm.timeout = 20
    dist.barrier()
    say(f"rank {rank} went on")


def stopped_at_work(rank: int) -> None:
    """Rank 1 is stopped while 64 MiB after 64 MiB are reduced, and wakes up when rank 0 gave up."""
    comm, tensor = dist.group.WORLD._comm, np.zeros(1 << 24, np.float32)
    dist.all_reduce(tensor)
    comm.timeout = 2.5
    if rank == 1:
        child = os.fork()
        if child == 0:
            time.sleep(0.3)
            os.kill(os.getppid(), signal.SIGSTOP)
            time.sleep(4)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
    began = time.monotonic()
    try:
        while True:
            began = time.monotonic()
            dist.all_reduce(tensor)
    except (dist.DistTimeoutError, dist.DistMismatchError) as error:
        say(f"rank {rank} after {time.monotonic() - began:.1f} s: {error}")
    if rank == 1:
        os.waitpid(child, 0)
    comm.timeout = 20
    while True:
        try:
            dist.barrier()
            break
        except dist.DistMismatchError:  # rank 1 had all it needed, and went into the next one
            continue
    dist.all_reduce(tensor)
    say(f"rank {rank} went on")


def unchecked(rank: int) -> None:
    """Without the entry check a call that cannot end is ended by the watchdog."""
    native = dist.group.WORLD._comm
    native.check = 0
    native.timeout = 1.0
    if rank == 0:
        dist.all_reduce(np.ones(1000, np.float32))
    else:
        time.sleep(120)


PROGRAMS = {
    program.__name__: program
    for program in (
        exception,
        sys_exit,
        os_exit,
        killed,
        terminated,
        killed_at_work,
        ended_while_sharing,
        unhandled_ctrl_c,
        interrupted,
        multiprocessing_fork,
        data_loader,
        in_backward,
        ends_anyhow,
        ends_with_messages,
        outstanding,
        forgotten,
        unseen,
        forked,
        forked_handles,
        stopped,
        stopped_at_work,
        unchecked,
    )
}


def main() -> None:
    name, *how = sys.argv[1:]
    if "mpi4py" in how:
        from mpi4py import MPI  # noqa: F401 - starts MPI, and will finalize it

        how.remove("mpi4py")
    dist.init_process_group(timeout=timedelta(seconds=20))
    dist.barrier()
    for file in mapped_shm():
        say(f"shm {file}")
    if dist.get_rank() == 0 and name != "in_backward":  # which begins once torch is there
        say(f"began {time.time():.3f}")
    PROGRAMS[name](dist.get_rank(), *how)


if __name__ == "__main__":
    main()
