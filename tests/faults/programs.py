"""The programs that test_endings.py starts under mpirun: each ends in one unhappy way on rank 1.

    mpirun -n 2 python programs.py NAME

They print `in time` lines for what the tests measure, and nothing they do may hang.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from datetime import timedelta

import torch

import hpcdist as dist


def say(text: str) -> None:
    """Print a line in one piece: print() would write text and newline apart, and ranks mix."""
    os.write(1, f"{text}\n".encode())


def others_wait(idle: bool = False) -> None:
    """What the ranks do that are not at fault: a collective, or computing for long."""
    if idle:
        time.sleep(120)
    dist.all_reduce(torch.ones(3))


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


def interrupted(rank: int, where: str) -> None:
    """Ctrl-C on rank 0 in a call that rank 1 does not join until later; then both go on."""
    tensor = torch.ones(3)
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
        elif where == "wait":
            dist.all_reduce(tensor)
    if where == "wait" and rank == 0:
        work.wait()
        assert tensor.tolist() == [2, 2, 2]
    last = torch.ones(2)
    dist.all_reduce(last)
    assert last.tolist() == [2, 2]
    say(f"rank {rank} went on")


def outstanding(rank: int) -> None:
    """Operations in flight at the end that everybody has started: they complete."""
    dropped = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(20)]
    del dropped
    if rank == 0:
        dist.isend(torch.ones(4), 1)
    else:
        dist.irecv(torch.ones(4), 0)
    say(f"rank {rank} ends")


def forgotten(rank: int) -> None:
    """Rank 0 ends with a collective in flight that rank 1 never starts; rank 1 stays for long."""
    if rank == 0:
        dist.all_reduce(torch.ones(3), async_op=True)
    else:
        time.sleep(120)


def unseen(rank: int) -> None:
    """An operation fails and nobody looks at its Work."""
    if rank == 0:
        dist.all_reduce(torch.ones(3), async_op=True)
        time.sleep(1)


def forked(rank: int) -> None:
    """A forked child is told at once; the parent goes on."""
    child = os.fork()
    if child == 0:
        began = time.monotonic()
        try:
            dist.all_reduce(torch.ones(3))
        except dist.DistError as error:
            if time.monotonic() - began < 0.1 and "fork" in str(error):
                say("child told")
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    others_wait()
    say(f"rank {rank} went on")


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


def unchecked(rank: int) -> None:
    """Without the entry check a call that cannot end is ended by the watchdog."""
    native = dist.group.WORLD._comm
    native.check = 0
    native.timeout = 1.0
    if rank == 0:
        dist.all_reduce(torch.ones(1000))
    else:
        time.sleep(120)


PROGRAMS = {
    program.__name__: program
    for program in (
        exception,
        sys_exit,
        os_exit,
        killed,
        interrupted,
        outstanding,
        forgotten,
        unseen,
        forked,
        stopped,
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
    if dist.get_rank() == 0:
        say(f"began {time.time():.3f}")
    PROGRAMS[name](dist.get_rank(), *how)


if __name__ == "__main__":
    main()
