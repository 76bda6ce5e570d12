"""Groups that are made, used and destroyed; also while others wait in them."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np

import hpcdist as dist
from chaos.program import DESTROY, MAKE, USE, Step, lifetime, members


def run(runner: Any, step: Step, group: Any) -> None:
    """Make a new group with a step's timeout, use it, destroy it."""
    ranks = members(runner.drawn, runner.stream, step)
    timeout = timedelta(seconds=lifetime(step, group.carrier.timeout))
    made: list[Any] = []
    runner.pause(step)

    def make() -> None:
        made.append(dist.new_group(ranks, timeout=timeout))

    kind, began, text = runner.attempt(_plain(step), make, None, group)
    if not runner.drawn.row.deaths:
        # A late rank is in time for the next try: the others must not make that for another step.
        runner.board.meet(runner.rank, runner.stream)
    if runner.rank not in ranks:
        runner.write(step.number, MAKE, "away" if kind == "ok" else kind, began, text)
        return
    runner.write(step.number, MAKE, kind, began, text)
    if kind != "ok":
        return
    new = made[0]
    if step.op == "destroyed":
        _use_elsewhere(runner, step, new, ranks)
    elif step.op == "subgroup" or runner.rank != ranks[0]:
        _use(runner, step, new)
    destroy(runner, step, new, DESTROY)


def destroy(runner: Any, step: Step, new: Any, part: int) -> None:
    """Destroy a group of this step, and write down what came of it."""
    began = time.monotonic()
    try:
        dist.destroy_process_group(new)
        runner.write(step.number, part, "ok", began)
    except Exception as error:
        runner.write(step.number, part, "error", began, f"{type(error).__name__}: {error}")


def _plain(step: Step) -> Step:
    return replace(step, signal=None)


def _use(runner: Any, step: Step, new: Any) -> None:
    total = np.full(max(1, step.size), new.rank() + 1 + step.number % 7, np.int64)

    def make() -> None:
        dist.all_reduce(total, group=new)

    kind, began, text = runner.attempt(_plain(step), make, None, new)
    if kind == "ok":
        n = new.size()
        want = n * (n + 1) // 2 + n * (step.number % 7)
        kind = "ok" if (total == want).all() else "wrong"
        text = "" if kind == "ok" else f"{total[:3]}, not {want}"
    runner.write(step.number, USE, kind, began, text)


def _use_elsewhere(runner: Any, step: Step, new: Any, ranks: list[int]) -> None:
    """One rank waits in another thread for a call that nobody joins; then all destroy the group."""
    if runner.rank != ranks[0] or len(ranks) == 1:
        return

    def wait() -> None:
        began = time.monotonic()
        try:
            dist.all_reduce(np.ones(max(1, step.size)), group=new)
            runner.write(step.number, USE, "wrong", began, "returned without the others")
        except Exception as error:
            runner.write(step.number, USE, "error", began, f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(min(0.05, new.carrier.timeout / 3))
    runner.threads.append(thread)
