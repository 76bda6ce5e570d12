"""Point to point: pairs, rings, receives from any rank, objects.

A receiver tries again until it has the message: one that was sent may not be lost, whatever came
between. Every step has a tag of its own, so that nothing old can match.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np

import hpcdist as dist
from chaos.cases import STALE, compare, thing, values
from chaos.program import Step

#: Seconds for which a receiver tries again. No rank is ever as late.
PATIENCE = 8.0


def run(runner: Any, step: Step, group: Any) -> None:
    """Make a step's messages as this rank."""
    if step.op == "ring":
        return _ring(runner, step, group)
    step = replace(step, size=max(1, step.size))  # one can see that it has come
    ranks, rank = group.size(), group.rank()
    source, to = step.root, (step.root + 1) % ranks
    runner.pause(step)
    objects = step.op == "pair_objects" and group.carrier.timeout > 4
    if rank == source:
        _send(runner, step, group, to, objects)
    elif rank == to:
        _receive(runner, step, group, -1 if step.op == "pair_any" else source, objects)
    else:
        runner.write(step.number, 0, "away", time.monotonic())


def _tag(step: Step) -> int:
    return 2000 + step.number % 1_000_000


def _send(runner: Any, step: Step, group: Any, to: int, objects: bool) -> None:
    tensor = runner.wrap(values(step, group.rank(), step.size))

    def make() -> None:
        if objects:
            dist.send_object_list([thing(step, group.rank())], group=group, group_dst=to)
        else:
            dist.send(tensor, group=group, tag=_tag(step), group_dst=to)

    kind, began, text = runner.attempt(replace(step, signal=None), make, None, group)
    runner.write(step.number, 0, kind, began, text)


def _receive(runner: Any, step: Step, group: Any, source: int, objects: bool) -> None:
    out = np.full(step.size, STALE, step.dtype)
    into, got, tries = runner.wrap(out), [None], 0

    def make() -> None:
        if objects:
            dist.recv_object_list(got, group=group, group_src=step.root)
        elif source < 0:
            dist.recv(into, group=group, tag=_tag(step))
        else:
            dist.recv(into, group=group, tag=_tag(step), group_src=source)

    end, want = time.monotonic() + PATIENCE, values(step, step.root, step.size)
    while True:
        tries += 1
        kind, began, text = runner.attempt(step, make, None, group)
        if kind == "own" and (got[0] if objects else not compare(out, want)):
            kind = "ok"  # it came out of a call that had received
        again = kind == "own" or (kind == "error" and text.startswith("DistTimeoutError"))
        if not again or time.monotonic() > end:
            break
        runner.write(step.number, tries, "own", began, text)
    if kind == "ok":
        right = thing(step, step.root)
        problem = compare(out, want) if not objects else ""
        if objects and got != [right]:
            problem = f"{str(got)[:100]}, not {str(right)[:100]}"
        kind, text = ("wrong", problem) if problem else ("ok", "")
    runner.write(step.number, 0, kind, began, text)


def _ring(runner: Any, step: Step, group: Any) -> None:
    """Everybody sends to the next rank; short, because a message may come when nobody waits."""
    ranks, rank = group.size(), group.rank()
    size, tag = min(step.size, 100), _tag(step)
    before, after = (rank - 1) % ranks, (rank + 1) % ranks
    out = np.full(size, STALE, step.dtype)
    mine = values(step, rank, size)
    batch = [
        dist.P2POp(dist.isend, runner.wrap(mine), group=group, tag=tag, group_peer=after),
        dist.P2POp(dist.irecv, runner.wrap(out), group=group, tag=tag, group_peer=before),
    ]
    runner.pause(step)

    def make() -> None:
        for work in dist.batch_isend_irecv(batch):
            runner.finish(work)

    kind, began, text = runner.attempt(replace(step, signal=None), make, None, group)
    if kind == "ok":
        kind, text = runner.judge(lambda: compare(out, values(step, before, size)))
    runner.write(step.number, 0, kind, began, text)
