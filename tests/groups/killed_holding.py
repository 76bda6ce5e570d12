"""A rank dies inside accumulate, while it holds another rank's memory; the others go on.

Rank 2 accumulates a large tensor into rank 0's memory again and again, and is killed meanwhile. The
others accumulate there too: they wait for the memory that the dead rank holds.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta

import torch

import hpcdist as dist

LARGE, VICTIM = 4_000_000, 2


def window_of(pg: dist.ProcessGroup, length: int) -> tuple[dist.Window, torch.Tensor]:
    memory = dist.zeros(length)
    window = pg.new_window(memory)
    dist.barrier()
    return window, memory


def die_soon() -> None:
    time.sleep(0.5)
    os.write(1, f"died {time.monotonic()}\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)


def until_lost(window: dist.Window) -> str:
    """Accumulate until the memory is not given back; return the error's text."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            window.accumulate(torch.ones(16), 0)
        except dist.RankFailedError as error:
            assert error.ranks == (VICTIM,), error.ranks
            return str(error)
        time.sleep(0.001)
    return ""


def main() -> None:
    dist.init_process_group(timeout=timedelta(seconds=60))
    world = dist.group.WORLD
    assert world is not None
    window, _ = window_of(world, LARGE)
    if dist.get_rank() == VICTIM:
        threading.Thread(target=die_soon, daemon=True).start()
        ones = torch.ones(LARGE)
        while True:
            window.accumulate(ones, 0)
    text = until_lost(window)
    os.write(1, f"told {time.monotonic()} {text or 'nothing: it held no memory'}\n".encode())
    done = world.reconfigure(timeout=timedelta(seconds=20))
    assert done.wait() and done.lost == (VICTIM,), done
    try:
        window.put(torch.ones(1), 0)
    except dist.DistError as error:
        assert "was reconfigured since this window was made" in str(error), error
    else:
        raise AssertionError("a window outlived the world that it was made in")
    window, memory = window_of(world, 1000)
    for rank in range(world.size()):
        window.accumulate(torch.ones(1000), rank)
    dist.barrier()
    assert bool((memory == world.size()).all()), memory
    dist.destroy_process_group()
    print("went on", flush=True)


main()
