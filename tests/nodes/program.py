"""What the ranks run while tests/nodes/faults.py cuts their link or kills them.

    program.py OPERATION TIMEOUT END FOLDER

Calls one operation over and over and checks each result. What a rank does stands in a file of its
own, a line for each thing, with the time: the driver reads it, however the rank ends. END is what
it does after an error: "raise" it, or "catch" it, destroy the group and exit with 0.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np

import hpcdist as dist

LARGE = 25 << 18  # float32 elements: 25 MiB
#: For the ranks to start, of which the driver waits for as long.
FIRST = timedelta(seconds=90)
#: Calls between two looks at whether to stop, which all ranks take together.
CALLS = 8


class Log:
    """The file of one rank."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("a", buffering=1)

    def say(self, word: str, text: object = "") -> None:
        line = str(text).replace("\n", " / ")
        self.file.write(f"{time.time():.6f} {word} {line}\n")


def right(found: np.ndarray, wanted: float) -> None:
    if not (found == wanted).all():
        raise AssertionError(f"wrong result: {found.ravel()[:4]}, wanted {wanted}")


def reduce_of(count: int, how: str = "") -> Callable[[int], None]:
    def call(i: int) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        x = np.full(count, rank + i % 7, np.float32)
        work = dist.all_reduce(x, async_op=bool(how))
        if how:
            time.sleep(0.002)
            work.wait()
        right(x, size * (size - 1) / 2 + size * (i % 7))

    return call


def ring(count: int) -> Callable[[int], None]:
    def call(i: int) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        x, y = np.full(count, rank + i, np.float64), np.empty(count, np.float64)
        if rank % 2:
            dist.recv(y, (rank - 1) % size)
            dist.send(x, (rank + 1) % size)
        else:
            dist.send(x, (rank + 1) % size)
            dist.recv(y, (rank - 1) % size)
        right(y, (rank - 1) % size + i)

    return call


def lists(i: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = [np.empty(1000 + 100_000 * (r % 2), np.float32) for r in range(size)]
    dist.all_gather(parts, np.full(1000 + 100_000 * (rank % 2), rank * 10 + i % 5, np.float32))
    for r, part in enumerate(parts):
        right(part, r * 10 + i % 5)


def barrier(i: int) -> None:
    dist.barrier()


def group(i: int) -> None:
    made = dist.new_group(list(range(dist.get_world_size())))
    x = np.full(3, 1 + i, np.int64)
    dist.all_reduce(x, group=made)
    right(x, dist.get_world_size() * (1 + i))
    dist.destroy_process_group(made)


def backward() -> Callable[[int], None]:
    import torch

    def build() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Linear(512, 256))

    alone = build()
    alone(torch.ones(4, 256)).sum().backward()
    model = dist.DistributedDataParallel(build())

    def call(i: int) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        model.zero_grad()
        (model(torch.ones(4, 256)).sum() * (rank + 1)).backward()
        for mean, one in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mean.grad, one.grad * (size + 1) / 2)

    return call


CALL: dict[str, Callable[[], Callable[[int], None]]] = {
    "small": lambda: reduce_of(2),
    "large": lambda: reduce_of(LARGE),
    "async": lambda: reduce_of(100_000, "async"),
    "messages": lambda: ring(10),
    "long_messages": lambda: ring(1_000_000),
    "lists": lambda: lists,
    "barrier": lambda: barrier,
    "new_group": lambda: group,
    "backward": backward,
}


def starts(log: Log, timeout: timedelta, folder: Path) -> None:
    """Start and end the process group, over and over."""
    i = 0
    while True:
        log.say("calls", i)
        dist.init_process_group(timeout=timeout if i else FIRST)
        log.say("started", i)
        stop = np.array([(folder / "stop").exists()])
        dist.broadcast(stop, 0)
        dist.destroy_process_group()
        i += 1
        if stop[0]:
            return


def goes_on(log: Log, i: int) -> int:
    """Recover with the ranks that are left, and agree on the next call."""
    dist.group.WORLD.reconfigure()
    log.say("left", dist.get_world_size())
    last = np.array([i])
    dist.all_reduce(last, dist.ReduceOp.MAX)
    return int(last[0])


def calls(log: Log, operation: str, timeout: timedelta, folder: Path) -> None:
    log.say("calls", "init_process_group")
    dist.init_process_group(timeout=FIRST)
    call = CALL[operation]()
    dist.barrier()
    dist.group.WORLD.timeout = timeout
    i = 0
    while True:
        try:
            log.say("calls", i)
            call(i)
            i += 1
            if i % CALLS == 0:
                log.say("calls", "broadcast")
                stop = np.array([(folder / "stop").exists()])
                dist.broadcast(stop, 0)
                if stop[0]:
                    break
        except dist.RankFailedError:
            if not dist.group.WORLD.supports_reconfigure:
                raise
            i = goes_on(log, i)
    log.say("calls", "destroy_process_group")
    dist.destroy_process_group()


def main() -> None:
    operation, seconds, end, name = sys.argv[1:]
    folder = Path(name)
    rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]
    log = Log(folder / f"rank.{rank}")
    # what it says last reaches no mpirun beyond a link that is cut
    os.dup2(os.open(folder / f"stderr.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    log.say("pid", os.getpid())
    timeout = timedelta(seconds=float(seconds))
    try:
        if operation == "start":
            starts(log, timeout, folder)
        else:
            calls(log, operation, timeout, folder)
    except Exception as error:
        log.say("error", f"{type(error).__name__}: {error}")
        if end == "raise":
            raise
        if dist.is_initialized():
            dist.destroy_process_group()
    log.say("ends")


if __name__ == "__main__":
    main()
