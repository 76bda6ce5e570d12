"""One rank of an episode: make the moves and write down what came of each."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

import hpcdist as dist
from chaos import aliases, cases, limits, messages, mistakes, program, subgroups
from chaos.alarm import Alarm, Interrupted, arm_death
from chaos.board import PID, VOTE, Board
from chaos.journal import Journal
from chaos.program import Episode, Step

#: Moves between two looks at the clock, and such blocks between two meetings, where the groups are
#: tried with time enough.
BLOCK, MEETING = 20, 8


class Runner:
    """One stream of a rank: a thread and the groups that it uses."""

    def __init__(self, drawn: Episode, stream: int, groups: list[Any], place: Any) -> None:
        self.drawn, self.stream, self.groups = drawn, stream, groups
        self.board, self.journal, self.rank, self.damage = place
        self.alarm = Alarm() if drawn.row.streams == 1 else None
        self.limits = limits.Limits(drawn.descriptors, drawn.memory)
        self.wrap = _wrapper(drawn.row.tensors)
        self.threads: list[threading.Thread] = []
        self.trainers: dict[int, Any] = {}

    def run(self, end: float) -> None:
        """Move until rank 0's time is up; then all stop after the same block."""
        moves, block = program.moves(self.drawn, self.stream), 0
        while self.board.may_go(self.rank, self.stream, block, end):
            for _ in range(BLOCK):
                self.move(next(moves))
            block += 1
            if block % MEETING == 0:
                self.verify(block)
        self.verify(block)

    def verify(self, block: int) -> None:
        """All ranks are here: every group that said it can be used must work."""
        for thread in self.threads:
            thread.join()
        self.threads.clear()
        self.board.meet(self.rank, self.stream)
        for i, group in enumerate(self.own_groups()):
            began = time.monotonic()
            self.board.enter(self.rank, self.stream, -1 - block, 10.0)
            try:
                good = mistakes.usable(group)
                text = "" if good else "a wrong sum"
                self.write(-1 - block, i, "ok" if good else "wrong", began, text)
            except Exception as error:
                text = f"not usable: {type(error).__name__}: {error}"
                self.write(-1 - block, i, "error", began, text)
            self.board.leave(self.rank, self.stream)
        self.board.meet(self.rank, self.stream)

    def own_groups(self) -> list[Any]:
        return [self.groups[self.stream]] if self.drawn.row.streams > 1 else self.groups

    def write(self, number: int, part: int, kind: str, began: float, text: str = "") -> None:
        self.journal.write(self.stream, number, part, kind, began, text)

    def move(self, move: list[Step]) -> None:
        step = move[0]
        group = self.groups[step.group]
        if step.op in cases.BUILDERS and len(move) > 1:
            self.burst(move, group)
        elif step.op in cases.BUILDERS or step.op == "aliased":
            self.single(step, group)
        elif step.op == "train":
            from chaos import training  # it imports torch

            training.run(self, step, group)
        elif step.op in program.WINDOWS:
            from chaos import windows

            windows.run(self, step, group)
        elif step.op in program.P2P:
            messages.run(self, step, group)
        else:
            subgroups.run(self, step, group)

    def votes(self, rank: int, mine: float) -> list[float]:
        """A number of each rank, by the board: all ranks must come here."""
        self.board.set(rank, self.stream, VOTE, mine)
        self.board.meet(rank, self.stream)
        every = [self.board.cell(each, self.stream, VOTE) for each in range(self.drawn.ranks)]
        self.board.meet(rank, self.stream)
        return every

    def agree(self, step: Step, good: bool) -> bool:
        """Whether it was good on all ranks."""
        return not any(self.votes(self.rank, 0.0 if good else step.number + 1))

    def catch_up(self, group: Any) -> None:
        """Have ranks that have made fewer calls make up for them, where an error came between."""
        comm = group.carrier
        every = self.votes(self.rank, float(comm.seq))
        while comm.seq < max(every):
            with suppress(dist.DistError):
                dist.barrier(group)
        self.board.meet(self.rank, self.stream)

    def pause(self, step: Step) -> None:
        late = step.late.get(self.rank)
        if late:
            time.sleep(late)

    def single(self, step: Step, group: Any) -> None:
        """One collective, waited for at once, or never."""
        case = cases.Case(step, group, self.wrap)
        build = aliases.build if step.op == "aliased" else cases.BUILDERS[step.op]
        call, check = build(case)
        odd = step.odd is not None and step.odd[0] == self.rank
        if odd:
            call = mistakes.call(case, step.odd[1])
        mode = "sync" if step.op not in program.SINGLE else step.mode
        self.pause(step)

        def make() -> None:
            work = call(mode != "sync")
            if work is not None and mode != "dropped":
                self.finish(work)

        comm = group.carrier if step.op in program.SINGLE or step.op in program.OBJECTS else None
        kind, began, text = self.attempt(step, make, comm, group)
        if kind == "ok" and not odd:
            kind, text = ("dropped", "") if mode == "dropped" else self.judge(check)
        self.write(step.number, 0, kind, began, text)

    def finish(self, work: Any) -> None:
        """Wait for a Work, again after an exception of our own handler."""
        while True:
            try:
                work.wait()
                return
            except Interrupted:
                if work.is_completed():
                    raise
                if self.alarm:
                    self.alarm.raised = False  # it came out

    def judge(self, check: Any) -> tuple[str, str]:
        problem = check()
        if self.damage and np.random.default_rng().random() < self.damage:
            problem = "damaged on purpose"
        return ("wrong", problem) if problem else ("ok", "")

    def attempt(self, step: Step, make: Any, comm: Any, group: Any) -> tuple[str, float, str]:
        """Make a call, with its signal; the kind of outcome, when it began, and its text."""
        mine = step.signal is not None and step.signal[0] == self.rank and self.alarm is not None
        while True:
            before = comm.seq if comm is not None else -1
            began = time.monotonic()
            self.board.enter(self.rank, self.stream, step.number, group.carrier.timeout)
            try:
                with self.limits:
                    if mine:
                        self.alarm.attempt(make, step.signal[1], step.signal[2], group)
                    else:
                        make()
                result = ("ok", began, "")
            except Interrupted:
                if comm is not None and comm.seq == before:
                    continue  # it came before the call was made
                result = ("own", began, "")
            except dist.RankFailedError as error:
                result = ("error", began, f"RankFailedError: {error}")
                time.sleep(0.02)
            except Exception as error:
                result = ("error", began, f"{type(error).__name__}: {error}")
            finally:
                self.board.leave(self.rank, self.stream)
            if mine and self.alarm.problem:
                return "lost", began, self.alarm.problem
            return result

    def burst(self, move: list[Step], group: Any) -> None:
        """Several asynchronous collectives, one behind the other; then wait for all."""
        built = [cases.BUILDERS[step.op](cases.Case(step, group, self.wrap)) for step in move]
        self.pause(move[0])
        began, works = [], []
        for call, _ in built:
            began.append(time.monotonic())
            try:
                works.append(call(True))
            except Exception as error:
                works.append(error)
        for i, step in enumerate(move):
            if isinstance(works[i], Exception):
                text = f"{type(works[i]).__name__}: {works[i]}"
                self.write(step.number, 0, "error", began[i], text)
                continue
            make, check = lambda i=i: self.finish(works[i]), built[i][1]
            kind, _, text = self.attempt(step, make, None, group)
            if kind == "ok":
                kind, text = self.judge(check)
            self.write(step.number, 0, kind, began[i], text)


def _wrapper(tensors: str) -> Any:
    if tensors == "numpy":
        return lambda array: array
    import torch

    return torch.from_numpy


def _launched_rank() -> str:
    names = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
    return next((os.environ[name] for name in names if name in os.environ), str(os.getpid()))


def _own_files(folder: Path) -> None:
    """Standard error into a file, and stacks of all threads into another on SIGUSR1."""
    name = _launched_rank()
    sink = os.open(folder / f"stderr.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(sink, 2)
    faulthandler.enable()
    stacks = open(folder / f"stacks.{name}", "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)


def _groups(drawn: Episode) -> list[Any]:
    made = [dist.new_group(timeout=timedelta(seconds=30)) for _ in drawn.timeouts]
    for group, timeout in zip(made, drawn.timeouts, strict=True):
        group.timeout = timedelta(seconds=timeout)
    return made


def main(folder: Path, drawn: Episode, damage: float, plant: str = "") -> None:
    """Run the episode as one rank of it."""
    _own_files(folder)
    if drawn.row.windows:
        import torch  # noqa: F401  # which takes longer than a call may
    if plant:
        from chaos import plants

        plants.PLANTS[plant]()
    dist.init_process_group(timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    board, journal = Board(folder / "board", drawn.ranks), Journal(folder, rank)
    groups = _groups(drawn)
    board.cells[rank, PID] = os.getpid()
    if drawn.shm > 0 and rank == 0 and "CHAOS_PRIVATE_SHM" in os.environ:
        limits.fill_shm(drawn.shm)
    board.meet(rank, 0)
    end = time.monotonic() + drawn.seconds
    place = (board, journal, rank, damage)
    runners = [Runner(drawn, i, groups, place) for i in range(drawn.row.streams)]
    journal.note("started")
    if drawn.death and drawn.death[0] == rank:
        arm_death(board, rank, drawn.death[1], drawn.death[2])
    if len(runners) == 1:
        runners[0].run(end)
    else:
        threads = [threading.Thread(target=each.run, args=(end,)) for each in runners]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    journal.note("ran")
    for group in [*groups, dist.group.WORLD]:
        group.timeout = timedelta(seconds=2)
    try:
        dist.destroy_process_group()
    except dist.DistTimeoutError as error:
        journal.note(f"destroy: {error}")
    journal.note("end")
    sys.exit(0)
