"""Windows: put, get, accumulate and signals; overlapping, from threads.

NumPy says what each rank's memory must hold. Ranks order what they write by signals, or by the page
of the driver's memory, which does not depend on hpcdist.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch

import hpcdist as dist
from chaos import closing
from chaos.cases import STALE, compare, values
from chaos.messages import PATIENCE
from chaos.program import ACTS, ADD, CLOSE, FOUND, GET, MAKE, MOST, PUT, REFUSED, TELL, WAIT, Step
from hpcdist import ReduceOp

#: Elements of a window before and behind those that a step writes.
GUARD = 8
#: Threads of `window_threads`, and how often each accumulates.
THREADS, TURNS = 3, 4
#: Dtypes of the same size, for a rank that registers another one.
OTHER = {
    "float32": "int32", "float64": "int64", "int32": "float32", "int64": "float64",
    "uint8": "int8", "int16": "float16", "float16": "int16", "complex64": "int64",
}  # fmt: skip


def run(runner: Any, step: Step, group: Any) -> None:
    """One step about windows: make one, use it, close it."""
    runner.pause(step)
    if step.op == "window_closed":
        return closing.run(runner, step, group)
    step = replace(step, size=min(step.size, 3000) if "thread" in step.op else step.size)
    use = Use(runner, step, group)
    if not runner.agree(step, use.make()):
        runner.catch_up(group)  # of its calls a rank whose handler raised has made but some
        return None
    if step.odd and step.odd[0] == runner.rank:
        use.refused()
    USES[step.op](use)
    runner.board.meet(runner.rank, runner.stream)
    use.call(CLOSE, use.window.tensor_deregister)
    return None


class Use:
    """What one rank does with the window of a step."""

    def __init__(self, runner: Any, step: Step, group: Any) -> None:
        self.runner, self.step, self.group = runner, step, group
        self.rank, self.ranks = group.rank(), group.size()
        self.before, self.after = (self.rank - 1) % self.ranks, (self.rank + 1) % self.ranks
        self.n, self.at = max(1, step.size), step.number % GUARD
        self.window: Any = None
        self.memory: Any = None
        self.plain = replace(step, signal=None)

    def call(self, part: int, make: Callable[[], Any], check: Any = None, signal: bool = False,
             write: bool = True) -> tuple[str, float, str]:  # fmt: skip
        """One call of the step, what came of it, and whether that is right."""
        step = self.step if signal else self.plain
        kind, began, text = self.runner.attempt(step, make, None, self.group)
        if kind == "ok" and check:
            kind, text = self.runner.judge(check)
        if write:
            self.runner.write(step.number, part, kind, began, text)
        return kind, began, text

    def make(self) -> bool:
        """Make the window; a mistake in the tensors is one of all ranks."""
        length, like = self.n + 2 * GUARD, torch.from_numpy(np.empty(0, self.step.dtype)).dtype
        odd = self.step.odd[1] if self.step.odd and self.step.odd[0] == self.runner.rank else ""

        def make() -> None:
            memory = dist.empty(length, dtype=like, group=self.group).fill_(STALE)
            if odd == "gaps":
                memory = memory[::2]
            elif odd == "kind":
                memory = memory.view(getattr(torch, OTHER[self.step.dtype]))
            self.window, self.memory = self.group.new_window(memory), memory

        # the others then wait in vain: not for long
        in_making = self.step.number % 3 == 0 and self.group.carrier.timeout < 4
        kind, _, _ = self.call(MAKE, make, signal=in_making)
        if in_making:
            self.step = self.plain
        return kind == "ok"

    def refused(self) -> None:
        """A mistake that only this rank hears of, and that must change nothing."""
        assert self.step.odd
        how, one = self.step.odd[1], torch.from_numpy(np.zeros(3, self.step.dtype))
        began = time.monotonic()
        try:
            if how == "range":
                self.window.put(one, self.after, self.n + 2 * GUARD - 2)
            elif how == "dtype":
                self.window.accumulate(one.to(torch.int8), self.after)
            elif how == "peer":
                self.window.get(one, self.ranks)
            else:
                return
            self.runner.write(self.step.number, REFUSED, "wrong", began, f"{how} was accepted")
        except (ValueError, TypeError) as error:
            self.runner.write(self.step.number, REFUSED, "ok", began, str(error))

    def data(self, rank: int, part: int = 0) -> np.ndarray:
        return values(self.step, rank, self.n, part)

    def holds(self, middle: np.ndarray) -> str:
        """What is wrong with this rank's memory, which must be stale but for the middle."""
        want = np.full(self.n + 2 * GUARD, STALE, self.step.dtype)
        want[self.at : self.at + self.n] = middle
        return compare(self.memory.numpy(), want)


def _ring(use: Use) -> None:
    """Put to the next rank, signal it; wait for the rank before; then read from another one."""
    window, mine = use.window, torch.from_numpy(use.data(use.rank))
    while use.call(PUT, lambda: window.put(mine, use.after, use.at), signal=True)[0] == "own":
        use.step = use.plain
    mine.fill_(0)  # it may be changed
    use.call(TELL, lambda: window.signal(use.after))
    _wait(use)
    use.runner.board.meet(use.runner.rank, use.runner.stream)
    out, of = np.full(2 * use.n, STALE, use.step.dtype), (use.rank + 2) % use.ranks
    into = torch.from_numpy(out)[:: 1 + use.step.number % 2][: use.n]
    want = use.data((of - 1) % use.ranks)
    use.call(GET, lambda: window.get(into, of, use.at), lambda: compare(into.numpy(), want))


def _wait(use: Use) -> None:
    """Wait for the signal, again after a timeout or a handler's exception: it may not be lost."""
    patient = time.monotonic() + PATIENCE
    limit = timedelta(seconds=0.002) if use.step.number % 4 == 1 else None
    options = dist.WaitSignalOptions(timeout=limit)
    for _ in itertools.count():
        kind, began, text = use.call(
            WAIT, lambda: use.window.wait_signal(use.before, opts=options),
            lambda: use.holds(use.data(use.before)), signal=True, write=False,
        )  # fmt: skip
        again = kind == "own" or (kind == "error" and text.startswith("DistTimeoutError"))
        if not again or time.monotonic() > patient:
            break
    use.runner.write(use.step.number, WAIT, kind, began, text)


def _sum(use: Use) -> None:
    """All ranks combine with the memory of one."""
    step, op = use.step, use.step.reduction
    start = values(step, use.ranks, use.n)
    if use.rank == step.root:
        use.memory[use.at : use.at + use.n] = torch.from_numpy(start)
    use.runner.board.meet(use.runner.rank, use.runner.stream)
    mine = torch.from_numpy(use.data(use.rank))
    kind, _, _ = use.call(
        ADD, lambda: use.window.accumulate(mine, step.root, use.at, op=getattr(ReduceOp, op)),
        signal=True,
    )  # fmt: skip
    # A handler's exception may come before or after; but in the middle there is none.
    told = use.runner.votes(use.rank, {"ok": 1.0, "own": 2.0}.get(kind, 0.0))
    unsure = [rank for rank, each in enumerate(told) if each == 2]
    wants = []
    for some in range(len(unsure) + 1):
        for inside in itertools.combinations(unsure, some):
            rows = [use.data(i) for i, each in enumerate(told) if each == 1 or i in inside]
            wants.append(_combined(op, [start, *rows], step.dtype))
    out = torch.from_numpy(np.full(use.n, STALE, step.dtype))

    def check() -> str:
        problems = [compare(out.numpy(), want) for want in wants]
        return "" if "" in problems else problems[0]

    use.call(GET, lambda: use.window.get(out, step.root, use.at), check)
    if use.rank == step.root:
        began, inner = time.monotonic(), use.memory[use.at : use.at + use.n].numpy().copy()
        problem = use.holds(inner)
        use.runner.write(step.number, FOUND, "wrong" if problem else "ok", began, problem)


def _combined(op: str, rows: list[np.ndarray], dtype: str) -> np.ndarray:
    function = {
        "SUM": np.add, "PRODUCT": np.multiply, "MIN": np.minimum, "MAX": np.maximum,
        "BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor,
    }[op]  # fmt: skip
    return function.reduce(np.stack(rows), 0, dtype)


def _threads(use: Use) -> None:
    """Three threads a rank accumulate, in the memory of all ranks, while the main one puts."""
    step, runner = use.step, use.runner
    use.memory.zero_()
    runner.board.meet(runner.rank, runner.stream)
    failed: list[int] = []

    def add(thread: int) -> None:
        mine, worst = torch.from_numpy(use.data(use.rank, thread)), (0.0, 0.0)
        kind, text = "ok", ""
        for turn in range(TURNS):
            began = time.monotonic()
            try:
                use.window.accumulate(mine, (use.rank + turn) % use.ranks, use.at)
            except Exception as error:
                kind, text = "error", f"{type(error).__name__}: {error}"
                failed.append(thread)
            ended = time.monotonic()
            worst = max(worst, (ended - began, began))
        spent, began = worst
        runner.journal.write(
            runner.stream, step.number, ACTS + thread, kind, began, text, began + spent
        )

    threads = [threading.Thread(target=add, args=(i,)) for i in range(THREADS)]
    for each in threads:
        each.start()
    some = torch.from_numpy(values(step, use.rank, 3, 50))
    behind = use.at + use.n + use.rank % 4  # one element a rank, behind the sums
    use.call(PUT, lambda: use.window.put(some[:1], use.after, behind), signal=True)
    for each in threads:
        each.join()
    if any(runner.votes(use.rank, float(len(failed)))):
        return
    want = np.zeros(use.n, step.dtype)
    for rank in range(use.ranks):
        turns = sum((rank + turn) % use.ranks == use.rank for turn in range(TURNS))
        for thread in range(THREADS):
            want += (turns * use.data(rank, thread)).astype(step.dtype)
    began, inner = time.monotonic(), use.memory[use.at : use.at + use.n].numpy()
    problem = compare(inner, want)
    runner.write(step.number, FOUND, "wrong" if problem else "ok", began, problem)


def _overlap(use: Use) -> None:
    """Each rank moves elements within the next one's memory, or its own where it maps no other."""
    maps = use.window.get_attr(use.after).access_type is dist.WindowAccessType.UNIFIED
    owner, mover = (use.after, use.before) if maps else (use.rank, use.rank)
    there = use.window.map_remote_tensor(owner)
    there.copy_(torch.from_numpy(_initial(use, owner)))
    ok = True
    for place, move in enumerate(_within(use, use.rank)):
        kind, _, text = use.call(ACTS + place, lambda move=move: move.make(use, owner, there))
        ok = ok and kind == "ok"
    told = use.runner.votes(use.rank, 0.0 if ok else 1.0)
    if told[mover]:
        return
    want = _initial(use, use.rank)
    for move in _within(use, mover):
        move.mirror(want, use.step.dtype)
    began = time.monotonic()
    problem = compare(use.memory.numpy(), want)
    use.runner.write(use.step.number, FOUND, "wrong" if problem else "ok", began, problem)


def _initial(use: Use, owner: int) -> np.ndarray:
    return values(use.step, owner, use.n + 2 * GUARD)


class Within:
    """One copy within a window's memory, from some of its elements to others."""

    def __init__(self, rng: random.Random, whole: int) -> None:
        self.how = rng.choice(["put", "put", "get", "accumulate"])
        self.form = rng.choice(["plain", "plain", "gaps", "turned"])
        self.n = max(1, rng.randint(1, whole // 2) // 2 * 2)
        span = 2 * self.n if self.form == "gaps" else self.n
        # the view begins here, and the elements that the call names there; often close together
        self.view = rng.randint(0, whole - span)
        near = min(max(0, self.view + rng.randint(-3, 3)), whole - self.n)
        self.named = near if rng.random() < 0.7 else rng.randint(0, whole - self.n)

    def places(self, whole: Any) -> Any:
        """The view, of a tensor or of an array."""
        if self.form == "gaps":
            return whole[self.view : self.view + 2 * self.n : 2]
        view = whole[self.view : self.view + self.n]
        if self.form == "turned" and self.n > 1:
            return view.reshape(2, self.n // 2).T
        return view

    def make(self, use: Use, owner: int, there: torch.Tensor) -> None:
        call: Any = getattr(use.window, self.how)
        more = {"op": _growing(use.step.dtype)} if self.how == "accumulate" else {}
        call(self.places(there), owner, self.named, **more)

    def mirror(self, memory: np.ndarray, dtype: str) -> None:
        view, named = self.places(memory), memory[self.named : self.named + self.n]
        if self.how == "get":
            view[...] = named.copy().reshape(view.shape)
        elif self.how == "put":
            named[...] = view.copy().reshape(-1)
        else:
            function = np.add if _growing(dtype) == ReduceOp.SUM else np.maximum
            named[...] = function(named, view.copy().reshape(-1))


def _growing(dtype: str) -> Any:
    """An operation whose results stay exact when it is repeated."""
    return ReduceOp.MAX if dtype == "float16" else ReduceOp.SUM


def _within(use: Use, rank: int) -> list[Within]:
    rng = use.runner.drawn.rng("within", use.runner.stream, use.step.number, rank)
    return [Within(rng, use.n + 2 * GUARD) for _ in range(MOST)]


USES: dict[str, Callable[[Use], None]] = {
    "window_ring": _ring, "window_sum": _sum, "window_threads": _threads,
    "window_overlap": _overlap,
}  # fmt: skip
