"""The judge: what each rank wrote down, side by side.

For each operation either all ranks that return a result return the right one, or every rank that
returns at all returns an error. Every call ends within its deadline and a second, or more where
processes share cores. Errors come only where a fault is, and groups work afterwards.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace

from chaos import program
from chaos.journal import Outcome
from chaos.program import DESTROY, MAKE, USE, Episode, Step, hook_of, lifetime, members, must_fail

#: Seconds: a group with a longer timeout has no reason to time out.
LONG = 4.0
#: What an error says that came while data moved.
MOVING = re.compile("while data moved|gave up while|is undefined")
#: How torch's futures hand on an error, for a callback of a user's own hook.
CALLBACK = "RuntimeError: Got the following error when running the callback: "
#: Seconds on top of a deadline.
SLACK = 1.0


def _of_all(step: Step) -> bool:
    """Whether all ranks hear of a step's mistake when they make the window."""
    return step.odd is not None and must_fail(step.odd[1], step.op, step.dtype)


@dataclass
class Verdict:
    """What came of an episode.

    Attributes
    ----------
    problems : list of str
        What must not be.
    counts : Counter
        Operations judged by what came of them, and faults by kind.
    slowest : float
        Seconds beyond a deadline, the most of all calls.
    """

    problems: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0


@dataclass(frozen=True)
class Stop:
    """A rank was stopped, from when to when."""

    rank: int
    began: float
    ended: float


class Judge:
    """Compares the journals of one episode."""

    def __init__(self, drawn: Episode, journals: list[list[Outcome]], stops: list[Stop],
                 ended_well: bool, slack: float = SLACK) -> None:  # fmt: skip
        self.drawn, self.stops, self.ended_well, self.slack = drawn, stops, ended_well, slack
        self.verdict = Verdict()
        self.torn: set[int] = set()  # groups in which something was found already
        self.calls: dict[tuple[int, int, int], dict[int, Outcome]] = defaultdict(dict)
        for rank, journal in enumerate(journals):
            for outcome in journal:
                if outcome.kind != "note":
                    key = (outcome.stream, outcome.number, outcome.part)
                    self.calls[key][rank] = outcome

    def judge(self) -> Verdict:
        for stream in range(self.drawn.row.streams):
            last = max((key[1] for key in self.calls if key[0] == stream), default=-1)
            for move in program.moves(self.drawn, stream):
                if move[0].number > last:
                    break
                for place, step in enumerate(move):
                    self.step(stream, step, place)
        for key, found in self.calls.items():
            if key[1] < 0:
                self.meeting(key, found)
        return self.verdict

    def problem(self, what: str, step: Step | str, found: dict[int, Outcome]) -> None:
        """Note what must not be; of a group only the first, since what follows may come of it."""
        group = step.group if isinstance(step, Step) else -1
        if group in self.torn and not what.startswith("WRONG"):
            self.verdict.counts["consequences"] += 1
            return
        self.torn |= {group} if group >= 0 else set()
        rows = [
            f"    rank {rank}: {each.kind:<6} {each.spent:8.4f} s  {each.text}"
            for rank, each in sorted(found.items())
        ]
        self.verdict.problems.append("\n".join([f"{what}: {step}", *rows]))

    def step(self, stream: int, step: Step, place: int) -> None:
        self.faults(step)
        found = self.calls.get((stream, step.number, 0), {})
        timeout = self.drawn.timeouts[step.group]
        if step.op in program.P2P:
            tries = [
                {rank: each for rank, each in self.calls[key].items()}
                for key in [(stream, step.number, i) for i in range(1, 100)]
                if key in self.calls
            ]
            for each in tries:
                self.on_time(step, each, timeout, place)
            self.message(step, found, timeout)
        elif step.op in program.GROUPS:
            self.group(stream, step, timeout)
        elif step.op in program.WINDOWS:
            self.window(stream, step, timeout)
            return
        elif step.op == "train":
            self.training(stream, step, found, timeout)
            return
        else:
            self.collective(step, found, timeout)
        self.on_time(step, found, timeout, place)

    def faults(self, step: Step) -> None:
        counts = self.verdict.counts
        counts["late"] += len(step.late)
        counts["signals"] += step.signal is not None
        counts["mistakes"] += step.odd is not None

    def complete(self, step: Step, found: dict[int, Outcome], expected: int) -> bool:
        if len(found) == expected:
            return True
        if self.ended_well:
            self.problem("a rank wrote nothing", step, found)
        return False

    def collective(self, step: Step, found: dict[int, Outcome], timeout: float) -> None:
        self.complete(step, found, self.drawn.ranks)
        if not found:
            return
        self.verdict.counts["windows" if step.op in program.WINDOWS else "operations"] += 1
        kinds = {each.kind for each in found.values()}
        if "wrong" in kinds:
            self.problem("WRONG RESULT", step, found)
        elif "lost" in kinds:
            self.problem("SIGNAL", step, found)
        elif {"ok", "error"} <= kinds:
            self.verdict.counts["mixed"] += 1
            own_affair = step.op == "train" and step.odd and not self.must_fail(step)
            if not self.may_mix(found) and not own_affair:
                self.problem("MIXED", step, found)
        elif "error" in kinds:
            self.verdict.counts["errors"] += 1
        if step.odd and "ok" in kinds and self.must_fail(step):
            self.problem("A MISTAKE WAS ACCEPTED", step, found)
        for each in found.values():
            if each.kind == "error" and not self.excused(step, each, timeout, found):
                self.problem("AN ERROR WITHOUT A FAULT", step, found)
                break

    def must_fail(self, step: Step) -> bool:
        assert step.odd
        return must_fail(step.odd[1], step.op, step.dtype, hook_of(self.drawn, step))

    def may_mix(self, found: dict[int, Outcome]) -> bool:
        """Whether some ranks may have a result and others an error.

        Only where data was on its way: what a rank has, it has, and its result is right.
        """
        errors = [each.text for each in found.values() if each.kind == "error"]
        return bool(self.drawn.row.deaths) or all(MOVING.search(text) for text in errors)

    def excused(self, step: Step, each: Outcome, timeout: float, found: dict[int, Outcome]) -> bool:
        """Whether there is a fault that this error may come from."""
        row = self.drawn.row
        if row.deaths or any(row.descriptors) or any(row.memory):
            return True
        if step.odd:
            if hook_of(self.drawn, step) == "averager":  # the others wait for a call of its program
                return True
            return not each.text.startswith("DistTimeoutError") or timeout < LONG
        name = each.text.removeprefix(CALLBACK).partition(":")[0]
        if step.op in program.WINDOWS and self.no_windows(each.text):
            return all(other.kind != "ok" for other in found.values())
        if step.op == "aliased" and name == "ValueError":
            return all(other.kind != "ok" for other in found.values())
        if any(other.kind == "own" for other in found.values()):
            # before its first part a rank refuses the operation, and says why
            refused = step.op == "train" or "arguments: Interrupted" in each.text
            return name in ("DistTimeoutError", "DistError", "DistMismatchError" * refused)
        return name == "DistTimeoutError" and timeout < LONG

    def message(self, step: Step, found: dict[int, Outcome], timeout: float) -> None:
        self.complete(step, found, self.drawn.ranks)
        if not found:
            return
        self.verdict.counts["messages"] += 1
        kinds = {each.kind for each in found.values()}
        if kinds & {"wrong", "lost"}:
            self.problem("WRONG RESULT" if "wrong" in kinds else "SIGNAL", step, found)
        receiver = found.get((step.root + 1) % self.drawn.ranks)
        sender = found.get(step.root)
        if step.op != "ring" and receiver and receiver.kind != "ok" and not self.drawn.row.deaths:
            if sender is None or sender.kind != "own":
                self.problem("A MESSAGE WAS LOST", step, found)
        for each in found.values():
            if each.kind == "error" and not self.excused(step, each, timeout, found):
                self.problem("AN ERROR WITHOUT A FAULT", step, found)
                break

    def group(self, stream: int, step: Step, timeout: float) -> None:
        ranks = members(self.drawn, stream, step)
        timeout = lifetime(step, timeout)
        parts = [self.calls.get((stream, step.number, part), {}) for part in (MAKE, USE, DESTROY)]
        made, used, destroyed = parts
        if not made:
            return
        self.verdict.counts["groups"] += 1
        inside = {made[rank].kind for rank in ranks if rank in made}
        if "ok" in inside and len(inside) > 1:
            self.problem("MIXED, a group is made on some ranks", step, made)
        elif "error" in inside and (timeout > LONG or not self.drawn.row.late):
            if not self.excused(step, next(iter(made.values())), timeout, made):
                self.problem("AN ERROR WITHOUT A FAULT", step, made)
        kinds = {each.kind for each in used.values()}
        if "wrong" in kinds or (step.op == "subgroup_left" and "ok" in kinds and len(ranks) > 1):
            self.problem("WRONG RESULT in a new group", step, used)
        elif {"ok", "error"} <= kinds and not self.may_mix(used):
            self.problem("MIXED in a new group", step, used)
        for part in (used, destroyed):
            self.on_time(step, part, timeout + (1.0 if part is destroyed else 0.0), 0)

    def no_windows(self, text: str) -> bool:
        """Whether it says that there are none, and this episode's groups may have none."""
        env = self.drawn.env
        if "has no windows" in text:  # without a page of the group's, the check goes through MPI
            return self.drawn.between_nodes or bool(self.drawn.shm)
        return "not symmetric" in text and bool("HPCDIST_NODE_MEMORY" in env or self.drawn.shm)

    def window(self, stream: int, step: Step, timeout: float) -> None:
        """Making and closing are collective; of what is between, each call is right by itself."""
        made = self.calls.get((stream, step.number, MAKE), {})
        if not made:
            return
        timeout = lifetime(step, timeout)
        self.collective(replace(step, odd=None) if not _of_all(step) else step, made, timeout)
        self.on_time(step, made, (3 if step.op == "window_closed" else 2) * timeout, 0)
        for part in [*range(program.PUT, program.ACTS + program.MOST)]:
            found = self.calls.get((stream, step.number, part), {})
            if not found:
                continue
            if any(each.kind in ("wrong", "lost") for each in found.values()):
                self.problem("WRONG RESULT in a window", step, found)
            for each in found.values():
                if each.kind == "error" and not self.excused_in_window(step, part, each, timeout):
                    lost = "A SIGNAL WAS LOST"
                    what = lost if part == program.WAIT else "AN ERROR WITHOUT A FAULT"
                    self.problem(f"{what} (part {part})", step, found)
                    break
            if part == program.CLOSE and {"ok", "error"} <= {each.kind for each in found.values()}:
                if not self.may_mix(found):
                    self.problem("MIXED, a window is closed on some ranks", step, found)
            if step.op != "window_closed" or part == program.DESTROYED:
                self.on_time(step, found, timeout + (part == program.DESTROYED), 0)

    def excused_in_window(self, step: Step, part: int, each: Outcome, timeout: float) -> bool:
        if self.drawn.row.deaths:
            return True
        if part == program.WAIT or not each.text.startswith("DistTimeoutError"):
            return False
        if part == program.DESTROYED:
            return True  # as of other groups: who is late leaves it behind
        return timeout < LONG

    def training(self, stream: int, step: Step, found: dict[int, Outcome], timeout: float) -> None:
        """Buckets have a deadline each, and a rank may be late in its own hook, too."""
        built = self.calls.get((stream, step.number, 1), {})
        if any(each.kind != "ok" for each in built.values()):
            self.problem("A GROUP CANNOT BE TRAINED IN after an error", step, built)
            return
        self.collective(step, found, timeout)
        if len({each.text for each in found.values() if each.kind == "ok"}) > 1:
            self.problem("WRONG RESULT: the ranks' gradients differ", step, found)
        self.on_time(step, found, timeout + max(step.late.values(), default=0.0), 0)

    def meeting(self, key: tuple[int, int, int], found: dict[int, Outcome]) -> None:
        self.verdict.counts["meetings"] += 1
        if {each.kind for each in found.values()} != {"ok"} and not self.drawn.row.deaths:
            if key[2] not in self.torn:
                where = f"group {key[2]} after block {-1 - key[1]}"
                self.problem("THE GROUP CANNOT BE USED", where, found)

    def on_time(self, step: Step, found: dict[int, Outcome], timeout: float, place: int) -> None:
        """Every call ends within its deadline; of a burst's later calls only failures tell."""
        for rank, each in found.items():
            if place and each.kind == "ok":
                continue
            stopped = sum(
                max(0.0, min(stop.ended, each.began + each.spent) - max(stop.began, each.began))
                for stop in self.stops
                if stop.rank == rank
            )
            beyond = each.spent - stopped - timeout
            self.verdict.slowest = max(self.verdict.slowest, beyond)
            if beyond > self.slack:
                self.problem(f"{beyond:.2f} s BEYOND THE DEADLINE on rank {rank}", step, found)
                return
