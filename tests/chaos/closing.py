"""Windows that are closed, by their ranks or with their group, while threads use them."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch

import hpcdist as dist
from chaos.program import ACTS, CLOSE, DESTROYED, MAKE, Step, lifetime
from chaos.subgroups import destroy

#: Seconds that a thread may go on after the group is gone; the wait for a signal is shorter.
LONGEST = 5.0
N = 500


def run(runner: Any, step: Step, group: Any) -> None:
    """A window in a group of its own; two threads use it; then it is closed."""
    step = replace(step, signal=None)
    timeout = timedelta(seconds=lifetime(step, group.carrier.timeout))
    made: list[Any] = []

    def make() -> None:
        made.append(dist.new_group(timeout=timeout))
        made.append(made[0].new_window(dist.zeros(N, group=made[0])))

    kind, began, text = runner.attempt(step, make, None, group)
    runner.write(step.number, MAKE, kind, began, text)
    if runner.agree(step, kind == "ok"):
        _close_in_use(runner, step, *made)
    if made:
        destroy(runner, step, made[0], DESTROYED)
    for thread in runner.threads:
        thread.join()
    runner.threads.clear()


def _close_in_use(runner: Any, step: Step, new: Any, window: Any) -> None:
    rank, ranks = new.rank(), new.size()
    end = time.monotonic() + LONGEST + new.carrier.timeout

    def write_and_read() -> None:
        mine, out = torch.full((N,), float(rank + 1)), torch.zeros(N)
        while time.monotonic() < end:
            window.put(mine, (rank + 1) % ranks)
            window.get(out, (rank + step.number) % ranks)
            window.accumulate(mine[:3], rank)

    def wait() -> None:
        window.wait_signal((rank + 1) % ranks)

    for part, act in enumerate((write_and_read, wait)):
        thread = threading.Thread(target=_until_it_is_closed, args=(runner, step, part, act))
        thread.start()
        runner.threads.append(thread)
    rng = np.random.default_rng(1000 * step.number + rank)
    time.sleep(float(rng.uniform(0, 0.02)))
    if step.number % 2:
        kind, began, text = runner.attempt(step, window.tensor_deregister, None, new)
        runner.write(step.number, CLOSE, kind, began, text)


def _until_it_is_closed(runner: Any, step: Step, part: int, act: Any) -> None:
    """Use a window until it says that it cannot be used: that is what must come of it."""
    began = time.monotonic()
    try:
        act()
        kind, text = "wrong", "it was used after it had been closed"
    except dist.DistError as error:
        kind, text = "ok", f"{type(error).__name__}: {error}"
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        kind = "ok" if "destroyed" in text else "error"
    runner.write(step.number, ACTS + part, kind, began, text)
