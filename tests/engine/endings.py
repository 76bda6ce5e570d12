"""The programs that test_endings.py starts under mpirun: each ends in one unhappy way on rank 1.

    mpirun -n 2 python endings.py NAME

They print `in time` lines for what the tests measure, and nothing they do may hang. NumPy's arrays
do for most: a job without torch starts in a fourth of the time.
"""

from __future__ import annotations

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

from ending_parts import others_wait, say  # noqa: E402
from endings_forked import data_loader, forked, forked_handles, multiprocessing_fork  # noqa: E402
from jobs import mapped_shm  # noqa: E402


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


def outlived(rank: int) -> None:
    """Rank 1 ends with a communicator that MPI may still write to; the other works for a while."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    if rank == 1:
        try:
            dist.all_reduce(np.ones(3), group=group)
        except dist.DistTimeoutError:
            dist.destroy_process_group(group)
    else:
        time.sleep(8)
    os.write(1, f"rank {rank} has worked\n".encode())


def received_from_any(rank: int) -> None:
    """The others leave the job in order, while rank 0 waits for a message of any of them."""
    if rank == 0:
        try:
            dist.recv(np.ones(3))
        except dist.RankFailedError as error:
            print(f"rank 0: {error}", flush=True)
    dist.destroy_process_group()


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
    """All ranks move tensors of all sizes without a pause; one is killed at some moment."""
    if rank == int(victim):

        def kill() -> None:
            time.sleep(float(after))
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=kill, daemon=True).start()
    size = dist.get_world_size()
    wholes = [np.zeros(n * size, np.float32) for n in (1, 3, 1000, 100_000, 1_000_000)]
    parts = [np.zeros(len(whole) // size, np.float32) for whole in wholes]
    while True:
        for whole, part in zip(wholes, parts, strict=True):
            dist.all_reduce(whole)
            dist.reduce_scatter_tensor(part, whole)
            dist.all_gather_into_tensor(whole, part)
            dist.all_to_all_single(np.empty_like(whole), whole)
            dist.broadcast(part, size - 1)


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
                try:
                    dist.all_reduce(np.ones(1, np.float32))
                except dist.DistTimeoutError as error:
                    say(f"late: {error}")
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
    if rank == 0:
        say(f"began {time.time():.3f}")
    dist.barrier()
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
    if "finalized" in states:
        from mpi4py import MPI

        dist.barrier()
        MPI.Finalize()
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
    elif how in ("destroy", "new_group"):  # which rank 1 joins too late, or not at all
        group = dist.new_group()
        if rank == 0:
            act = dist.destroy_process_group if how == "destroy" else dist.new_group
            args = (group,) if how == "destroy" else ()
            threading.Thread(target=act, args=args, daemon=True).start()
        time.sleep(0.1 if rank == 0 else 1.5)
    else:
        for _ in range(20):
            dist.irecv(np.zeros(1, np.float32), other)
    say("ends")


def pid_of_rank_1() -> int:
    """Return it on all ranks."""
    pid = np.array([os.getpid()])
    dist.broadcast(pid, 1)
    return int(pid[0])


def stopped(rank: int) -> None:
    """Rank 1 is stopped (SIGSTOP) until rank 0 has named it, in time."""
    pid = pid_of_rank_1()
    dist.group.WORLD.carrier.timeout = 2.5
    if rank == 1:
        os.kill(pid, signal.SIGSTOP)
    while rank == 0 and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)
    began = time.monotonic()
    try:
        dist.barrier()
    except dist.DistTimeoutError as error:
        say(f"rank {rank} after {time.monotonic() - began:.1f} s: {error}")
    os.kill(pid, signal.SIGCONT)
    dist.group.WORLD.carrier.timeout = 20
    dist.barrier()
    say(f"rank {rank} went on")


def stopped_at_work(rank: int) -> None:
    """Rank 1 is stopped while 64 MiB after 64 MiB are reduced, and wakes up when rank 0 gave up."""
    comm, tensor = dist.group.WORLD.carrier, np.zeros(1 << 24, np.float32)
    pid = pid_of_rank_1()
    dist.all_reduce(tensor)
    comm.timeout = 2.5
    if rank == 1:
        child = os.fork()
        if child == 0:
            time.sleep(0.3)
            os.kill(pid, signal.SIGSTOP)
            os._exit(0)
    began = time.monotonic()
    try:
        while True:
            began = time.monotonic()
            dist.all_reduce(tensor)
    except (dist.DistTimeoutError, dist.DistMismatchError) as error:
        say(f"rank {rank} after {time.monotonic() - began:.1f} s: {error}")
    os.kill(pid, signal.SIGCONT)
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
    native = dist.group.WORLD.carrier
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
        outlived,
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
        received_from_any,
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
    # MPICH's launcher looks for dead ranks, and kills the others, when a line arrives.
    dist.barrier()
    PROGRAMS[name](dist.get_rank(), *how)


if __name__ == "__main__":
    main()
