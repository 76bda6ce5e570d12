"""The programs that test_reports.py and fifty.py start: ranks that hang, each kind in its own way.

    mpirun -n 2 python hangs.py KIND...

Each kind makes rank 1 miss, or do something else than, what rank 0 waits in. The error texts and
the hang report must name rank 1, the operation, its number, and both lines, without any setting.
The lines are those with a mark: `# here: KIND` is where the other rank waits, `# hung: KIND` where
rank 1 is.
"""

from __future__ import annotations

import sys
import threading
import time
from datetime import timedelta

import numpy as np
from injected import LONGER, SECONDS, by_name, run

import hpcdist as dist


def late_all_reduce(rank: int, data: np.ndarray) -> None:
    if rank == 1:
        time.sleep(LONGER)  # hung: late_all_reduce
    else:
        dist.all_reduce(data)  # here: late_all_reduce


def late_barrier(rank: int, data: np.ndarray) -> None:
    if rank == 1:
        time.sleep(LONGER)  # hung: late_barrier
    else:
        dist.barrier()  # here: late_barrier


def late_broadcast(rank: int, data: np.ndarray) -> None:
    if rank == 1:
        time.sleep(LONGER)  # hung: late_broadcast
    else:
        dist.broadcast(data, 0)  # here: late_broadcast


def late_gathered(rank: int, data: np.ndarray) -> None:
    out = np.zeros(2 * data.size, data.dtype)
    if rank == 1:
        threading.Event().wait(LONGER)  # hung: late_gathered
    else:
        dist.all_gather_into_tensor(out, data)  # here: late_gathered


def late_computing(rank: int, data: np.ndarray) -> None:
    if rank == 1:
        until = time.time() + LONGER
        while time.time() < until:  # hung: late_computing
            sum(range(1000))  # hung: late_computing
    else:
        dist.all_reduce(data)  # here: late_computing


def late_in_c(rank: int, data: np.ndarray) -> None:
    """It keeps Python's lock: nothing of Python can run there."""
    if rank == 1:
        import ctypes

        ctypes.PyDLL(None).usleep(int(LONGER * 1e6))  # hung: late_in_c
    else:
        dist.all_reduce(data)  # here: late_in_c


def late_asynchronous(rank: int, data: np.ndarray) -> None:
    if rank == 1:
        time.sleep(LONGER)  # hung: late_asynchronous
    else:
        dist.all_reduce(data, async_op=True).wait()  # here: late_asynchronous


def late_object(rank: int, data: np.ndarray) -> None:
    if rank == 1:
        time.sleep(LONGER)  # hung: late_object
    else:
        dist.broadcast_object_list([{"a": 1}], 0)  # here: late_object


def no_send(rank: int, data: np.ndarray) -> None:
    if rank == 1:
        time.sleep(LONGER)  # hung: no_send
    else:
        dist.recv(data, 1, tag=3)  # here: no_send


def no_receive(rank: int, data: np.ndarray) -> None:
    if rank == 1:
        time.sleep(LONGER)  # hung: no_receive
    else:
        dist.send(np.zeros(1 << 20, np.float32), 1, tag=4)  # here: no_receive


def crossed(rank: int, data: np.ndarray) -> None:
    """Rank 1 waits for a message, rank 0 in a collective."""
    if rank == 1:
        dist.recv(data, 0, tag=9)  # hung: crossed
    else:
        dist.all_reduce(data)  # here: crossed


def other_operation(rank: int, data: np.ndarray) -> None:
    if rank == 1:
        dist.broadcast(data, 0)  # hung: other_operation
    else:
        dist.all_reduce(data)  # here: other_operation


def other_size(rank: int, data: np.ndarray) -> None:
    if rank == 1:
        dist.all_reduce(data[:2].copy())  # hung: other_size
    else:
        dist.all_reduce(data)  # here: other_size


def other_dtype(rank: int, data: np.ndarray) -> None:
    if rank == 1:
        dist.all_reduce(data.astype(np.int32))  # hung: other_dtype
    else:
        dist.all_reduce(data)  # here: other_dtype


def other_reduction(rank: int, data: np.ndarray) -> None:
    if rank == 1:
        dist.all_reduce(data, dist.ReduceOp.MAX)  # hung: other_reduction
    else:
        dist.all_reduce(data)  # here: other_reduction


def other_root(rank: int, data: np.ndarray) -> None:
    if rank == 1:
        dist.broadcast(data, 1)  # hung: other_root
    else:
        dist.broadcast(data, 0)  # here: other_root


def refused(rank: int, data: np.ndarray) -> None:
    if rank == 1:
        dist.all_reduce(data[::2])  # hung: refused
    else:
        dist.all_reduce(data)  # here: refused


KINDS = by_name(
    late_all_reduce, late_barrier, late_broadcast, late_gathered, late_computing, late_in_c,
    late_asynchronous, late_object, no_send, no_receive, crossed, other_operation, other_size,
    other_dtype, other_reduction, other_root, refused,
)  # fmt: skip


def catch_up() -> None:
    """Make the call that the other rank has given up: then the group is in step again."""
    try:
        dist.barrier()
    except dist.DistError:
        return


def main() -> None:
    dist.init_process_group(timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    dist.group.WORLD.carrier.timeout = SECONDS  # the start is not what is tried
    for name in sys.argv[1:]:
        dist.monitored_barrier(timeout=timedelta(seconds=20))
        run(KINDS[name], rank, np.ones(6, np.float32), (dist.DistError, ValueError))
        if rank == 1 and name.startswith(("late", "crossed")):
            catch_up()
        if name == "no_receive" and rank == 1:
            dist.recv(np.zeros(1 << 20, np.float32), 0, tag=4)
        time.sleep(0.3)


if __name__ == "__main__":
    main()
