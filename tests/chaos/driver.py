"""Episode after episode, the table of what came of them, and reports of what must not be."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from patience import patience

from chaos import program
from chaos.job import Ended, Job, mpi_starts
from chaos.journal import read
from chaos.oracle import LONG, Judge, Verdict
from chaos.program import Episode


@dataclass
class Settings:
    """What the command line says."""

    seed: str
    rows: list[str]
    ranks: list[int]
    seconds: float
    mpirun: list[str]
    env: dict[str, str]
    private: bool
    slack: float
    damage: float
    keep: bool
    plant: str = ""

    def arguments(self, number: int) -> list[str]:
        """The command line from which a rank draws the same episode."""
        return [
            "--seed", self.seed, "--episode", str(number), "--rows", *self.rows,
            "--np", ",".join(map(str, self.ranks)), "--seconds", str(self.seconds),
            "--damage", str(self.damage), *(["--plant", self.plant] if self.plant else []),
        ]  # fmt: skip


@dataclass
class Total:
    """What came of all episodes of a row."""

    episodes: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0
    problems: int = 0
    stops: int = 0
    deaths: int = 0
    seconds: float = 0.0


def one(settings: Settings, number: int) -> tuple[Episode, Ended, Verdict]:
    """Run one episode and judge it."""
    drawn = program.episode(settings.seed, number, settings.rows, settings.ranks, settings.seconds)
    folder = Path(tempfile.mkdtemp(prefix="chaos."))
    try:
        job = Job(
            drawn, folder, settings.mpirun, settings.arguments(number), settings.env,
            settings.private,
        )  # fmt: skip
        ended = job.run()
        journals = [
            [each for each in read(folder / f"journal.{rank}") if each.began < ended.hung_at]
            for rank in range(drawn.ranks)
        ]
        notes = [{each.text for each in journal if each.kind == "note"} for journal in journals]
        well = ended.code == 0 and all("end" in each for each in notes)
        slack = settings.slack * patience()
        verdict = Judge(drawn, journals, ended.stops, well, slack).judge()
        at_the_end = _of_the_end(drawn, ended, well)
        started = any("started" in each for each in notes)
        if at_the_end and not started and drawn.shm < 0:
            if not mpi_starts(drawn, folder, settings.mpirun, settings.env):
                at_the_end = []  # nor does MPI alone
        verdict.problems = [*at_the_end, *verdict.problems]
        verdict.counts["ended"] += not well
    finally:
        if not settings.keep:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            print(f"episode {number}: {folder}", flush=True)
    return drawn, ended, verdict


def _of_the_end(drawn: Episode, ended: Ended, well: bool) -> list[str]:
    """What must not be about how a job ended."""
    problems = []
    tail = ended.text[-2500:]
    if ended.hang:
        problems.append(f"HANG: {ended.hang}")
    if ended.crash and not mpi_without_memory(drawn, ended.crash):
        problems.append(f"CRASH: {ended.crash}\n{tail}")
    if ended.left:
        problems.append("LEFT BEHIND: " + ", ".join(ended.left))
    if ended.after_death >= 0:
        if ended.code == 0:
            problems.append(f"A RANK DIED ({drawn.death}) AND THE JOB ENDED WITH 0\n{tail}")
        if ended.after_death > 5.0 + 3.0:
            problems.append(f"THE JOB ENDED {ended.after_death:.1f} s AFTER A DEATH\n{tail}")
    elif not well and not ended.hang and not may_end(drawn):
        problems.append(f"THE JOB ENDED, status {ended.code}\n{tail}")
    elif not well and not ended.hang and drawn.row.stops and "hpcdist" not in ended.text:
        problems.append(f"THE JOB ENDED without a word, status {ended.code}\n{tail}")
    return problems


def may_end(drawn: Episode) -> bool:
    """Whether hpcdist may end the job.

    Between nodes a rank can miss that another has given up, if both happen in a message's time.
    """
    return drawn.row.may_end or (drawn.between_nodes and min(drawn.timeouts) < LONG)


def mpi_without_memory(drawn: Episode, crash: str) -> bool:
    """Whether a crash is MPI's own: it touches its segments in /dev/shm without reserving them."""
    return bool(drawn.shm) and all(re.search(r"\b[Bb]us error|: 7\b", line)
                                   for line in crash.splitlines())  # fmt: skip


def describe(drawn: Episode) -> str:
    """An episode in a line."""
    words = [f"episode {drawn.number} row {drawn.row.name} np {drawn.ranks}"]
    words.append("timeouts " + ",".join(f"{each:g}" for each in drawn.timeouts))
    words += [f"{name}={value}" for name, value in drawn.env.items()]
    if drawn.death:
        rank, after, how = drawn.death
        words.append(f"rank {rank} dies after {after:.1f} s: {how}")
    for name in ("shm", "descriptors", "memory"):
        if getattr(drawn, name):
            words.append(f"{name} {getattr(drawn, name)}")
    return ", ".join(words)


def report(settings: Settings, drawn: Episode, ended: Ended, verdict: Verdict) -> None:
    """Say what must not be, and how to see it again."""
    print(f"\n=== {describe(drawn)}: {len(verdict.problems)} problems", flush=True)
    again = [
        "python tests/chaos.py", f"--seed {settings.seed}", f"--episode {drawn.number}",
        f"--rows {' '.join(settings.rows)}", f"--np {','.join(map(str, settings.ranks))}",
        f"--seconds {settings.seconds:g}",
    ]  # fmt: skip
    print(f"    again: {' '.join(again)}")
    print(f"    status {ended.code}, {ended.seconds:.1f} s, {len(ended.stops)} stops")
    for problem in verdict.problems[:6]:
        print("  " + problem.replace("\n", "\n  "))
    if len(verdict.problems) > 6:
        print(f"  ... and {len(verdict.problems) - 6} more")
    if verdict.counts["consequences"]:
        print(f"  ... and {verdict.counts['consequences']} later ones in the same groups")
    sys.stdout.flush()


def run(settings: Settings, numbers: list[int] | None, minutes: float, jobs: int) -> int:
    """Run episodes until the time is over, or those that are named; 1 if anything must not be."""
    end = time.monotonic() + 60 * minutes
    totals: dict[str, Total] = {}
    queue = iter(numbers) if numbers is not None else iter(range(10**9))
    with ThreadPoolExecutor(jobs) as pool:
        running: set[Future] = set()
        while True:
            while len(running) < jobs and (numbers is not None or time.monotonic() < end):
                number = next(queue, None)
                if number is None:
                    break
                running.add(pool.submit(one, settings, number))
            if not running:
                break
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for each in done:
                add(settings, totals, *each.result())
    print_table(totals)
    return int(any(total.problems for total in totals.values()))


def add(settings: Settings, totals: dict[str, Total], drawn: Episode, ended: Ended,
        verdict: Verdict) -> None:  # fmt: skip
    """Count an episode and say a line about it."""
    total = totals.setdefault(drawn.row.name, Total())
    total.episodes += 1
    total.counts += verdict.counts
    total.slowest = max(total.slowest, verdict.slowest)
    total.problems += len(verdict.problems)
    total.stops += len(ended.stops)
    total.deaths += ended.after_death >= 0
    total.seconds += ended.seconds
    if verdict.problems:
        report(settings, drawn, ended, verdict)
    judged = sum(verdict.counts[name] for name in ("operations", "messages", "groups", "windows"))
    line = f"{describe(drawn)}: {judged:,} calls, {verdict.counts['errors']:,} errors, "
    line += f"{len(ended.stops)} stops, {ended.seconds:.0f} s"
    line += f", {len(verdict.problems)} PROBLEMS" if verdict.problems else ""
    if sys.stdout.isatty():
        done = sum(each.episodes for each in totals.values())
        bad = sum(each.problems for each in totals.values())
        print(f"\r\033[K{done} episodes, {bad} problems; {line}"[:160], end="", flush=True)
    else:
        print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def print_table(totals: dict[str, Total]) -> None:
    """One line a row, and their sum."""
    head = (
        f"{'row':<12}{'episodes':>9}{'operations':>11}{'messages':>10}{'groups':>8}{'windows':>9}{'errors':>9}"
        f"{'late':>9}{'stops':>7}{'signals':>9}{'mistakes':>9}{'deaths':>7}{'ended':>6}"
        f"{'worst s':>8}{'problems':>9}"
    )
    print(f"\n{head}")
    whole = Total()
    for name, total in [*totals.items(), ("all rows", whole)]:
        c = total.counts
        print(
            f"{name:<12}{total.episodes:>9}{c['operations']:>11}{c['messages']:>10}"
            f"{c['groups']:>8}{c['windows']:>9}{c['errors']:>9}{c['late']:>9}{total.stops:>7}{c['signals']:>9}"
            f"{c['mistakes']:>9}{total.deaths:>7}{c['ended']:>6}{total.slowest:>8.2f}"
            f"{total.problems:>9}",
            flush=True,
        )
        whole.episodes += total.episodes
        whole.counts += total.counts
        whole.slowest = max(whole.slowest, total.slowest)
        whole.problems += total.problems
        whole.stops += total.stops
        whole.deaths += total.deaths


def environment() -> dict[str, str]:
    """What jobs are started with."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    if os.getuid() == 0:
        env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return env
