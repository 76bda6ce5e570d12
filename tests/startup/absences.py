"""The programs that test_attendance.py starts under mpirun: rank 1 spoils the start.

mpirun -n 3 python absences.py NAME
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from datetime import timedelta

import numpy as np

import hpcdist as dist
from hpcdist import launchers

LIMIT = timedelta(seconds=3)


def say(text: str) -> None:
    """Print a line in one piece."""
    os.write(1, f"{text}\n".encode())


def start(limit: timedelta = LIMIT) -> None:
    """Make the default group, and say how long that took."""
    began = time.monotonic()
    try:
        dist.init_process_group(timeout=limit)
    except dist.DistError as error:
        say(f"after {time.monotonic() - began:.2f} s: {type(error).__name__}: {error}")
        raise


def start_again() -> int:
    """Try it up to three times; return how many ranks are there then."""
    for _ in range(3):
        try:
            start()
            break
        except dist.DistTimeoutError:
            continue
    total = np.ones(1)
    dist.all_reduce(total)
    return int(total[0])


def absent(rank: int) -> None:
    """One never comes."""
    if rank == 1:
        time.sleep(60)
    start()


def without_launcher(rank: int) -> None:
    """One never comes, and meanwhile the launcher is killed."""
    if rank == 1:
        time.sleep(20)
        return
    lock = open(os.environ["TEST_LOCK"])  # noqa: SIM115
    fcntl.flock(lock, fcntl.LOCK_EX)
    say("here")
    start(timedelta(seconds=60))


def raises(rank: int) -> None:
    """One fails before it comes."""
    if rank == 1:
        time.sleep(0.5)
        raise ValueError("boom")
    start()


def exits(rank: int) -> None:
    """One leaves with a status before it comes."""
    if rank == 1:
        sys.exit(3)
    start()


def leaves(rank: int) -> None:
    """One leaves in order before it comes."""
    if rank == 1:
        sys.exit(0)
    start(timedelta(seconds=60))


def again(rank: int) -> None:
    """One comes late to a second start; the others try again."""
    start()
    dist.destroy_process_group()
    if rank == 1:
        time.sleep(4.5)
    total = start_again()
    say(f"up with {total}")
    dist.destroy_process_group()


def mpi_is_up(rank: int) -> None:
    """The same where something else has started MPI."""
    from mpi4py import MPI

    if rank == 1:
        time.sleep(4.5)
    total = start_again()
    say(f"up with {total} of {MPI.COMM_WORLD.size}")
    dist.destroy_process_group()


def child(rank: int) -> None:
    """A process that a rank has started calls init_process_group, too."""
    dist.init_process_group(timeout=timedelta(seconds=30))
    if rank == 1:
        code = (
            "import hpcdist; from datetime import timedelta; "
            "hpcdist.init_process_group(timeout=timedelta(seconds=3)); "
            "print('rank', hpcdist.get_rank(), 'of', hpcdist.get_world_size())"
        )
        began = time.monotonic()
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        say(f"child ended with {ended.returncode} after {time.monotonic() - began:.2f} s")
        say(ended.stderr.splitlines()[-1] if ended.stderr else ended.stdout.strip())
    dist.barrier()
    dist.destroy_process_group()
    say("went on")


def nothing_left_open(rank: int) -> None:
    """Python names what a process has left open when it ends."""
    dist.init_process_group(timeout=timedelta(seconds=30))
    dist.barrier()
    if rank == 0:  # the others end with the group
        dist.destroy_process_group()
    say("went on")


def failing_tool(rank: int) -> None:
    """A program of a rank's that fails, and that imports hpcdist, does not end the job."""
    if rank == 1:
        os.system(f"{sys.executable} -c 'import hpcdist, sys; sys.exit(3)'")
    dist.init_process_group(timeout=timedelta(seconds=30))
    dist.barrier()
    dist.destroy_process_group()
    say("went on")


if __name__ == "__main__":
    say(f"began {time.time():.6f}")
    place = launchers.detect()
    assert place is not None and place.rank is not None
    globals()[sys.argv[1]](place.rank)
