"""Random programs over the public interface, drawn by hypothesis and run by all ranks alike.

Rank 0 draws a program, a list of steps in plain data, and hands it to the others on a communicator
of its own; so the ranks need not draw alike. A step names an operation and holds a value for every
argument that any operation takes; now and then one rank gets another value. Whatever the values
are, a call may end well or with a documented exception.
"""

from __future__ import annotations

import pickle
import traceback
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

import hpcdist as dist
from hpcdist import ReduceOp, _engine

#: What the functions' docstrings list.
DOCUMENTED = (ValueError, TypeError, dist.DistError)

SHAPES = [(), (0,), (1,), (2,), (4,), (2, 3), (3, 2), (0, 3), (700,)]
DTYPES = ["float32", "float64", "int32", "uint8", "bool", "bfloat16", "complex64", "float8_e5m2"]
KINDS = ["torch"] * 12 + ["numpy"] * 3 + [
    "turned", "gaps", "expanded", "sparse", "meta", "leaf", "conjugate", "bytes", "bytearray",
    "read-only", "None", "text", "list",
]  # fmt: skip
ODD_RANKS = [-(2**70), -1, 2**31, 2**70, None, "0", 0.5]
OBJECTS = [None, 1, "text", {"a": [1, 2.5]}, object, [[]], b"\0" * 300]

_tensor = st.tuples(st.sampled_from(KINDS), st.sampled_from(DTYPES), st.sampled_from(SHAPES))
_plain = st.tuples(st.just("torch"), st.just("float32"), st.sampled_from([(4,), (2, 3), (700,)]))
_some_tensor = st.one_of(_plain, _plain, _tensor)
_rank = st.one_of(st.integers(0, 1), st.integers(0, 1), st.sampled_from(ODD_RANKS), st.integers())
_timeout = st.sampled_from([None, 0.2, timedelta(seconds=0.2), -1, 0, "1", timedelta(0)])

_fields = {
    "tensor": _some_tensor,
    "other": _some_tensor,
    "rank": _rank,
    "op": st.sampled_from(
        ["SUM", "AVG", "MAX", "BAND", "PRODUCT", "PREMUL", "text", "UNKNOWN", None, 3]
    ),
    "group": st.sampled_from(["first"] * 6 + ["world"] * 3 + ["single", "closed", "outside", 17]),
    "async": st.booleans(),
    "longer": st.sampled_from([0] * 10 + [-1, 1]),
    "tag": st.sampled_from([0, 1, 5, 1000, -1, 2**31, 2**70, "x", 1.5]),
    "splits": st.sampled_from([None, None, [], [1], [2, 2], [-1, 5], [0, 4], "ab", [2**70, 0]]),
    "object": st.integers(0, len(OBJECTS) - 1),
    "timeout": _timeout,
    "ranks": st.sampled_from([None, [0], [0, 1], [1, 0], [0, 0], [5], [-1], "ab", 3, []]),
}

#: Operation -> call from a step. `at` is where the step runs: see `Place`.
CALLS = {
    "all_reduce": lambda s, at: dist.all_reduce(at.t(s), at.op(s), **at.rest(s)),
    "all_reduce_coalesced": lambda s, at: dist.all_reduce_coalesced(
        [at.t(s), at.t(s, "other")], at.op(s), **at.rest(s)
    ),
    "reduce": lambda s, at: dist.reduce(at.t(s), s["rank"], at.op(s), **at.rest(s)),
    "broadcast": lambda s, at: dist.broadcast(at.t(s), s["rank"], **at.rest(s)),
    "all_gather": lambda s, at: dist.all_gather(at.each(s), at.t(s), **at.rest(s)),
    "all_gather_into_tensor": lambda s, at: dist.all_gather_into_tensor(
        at.whole(s), at.t(s), **at.rest(s)
    ),
    "all_gather_coalesced": lambda s, at: dist.all_gather_coalesced(
        [[t] for t in at.each(s)], [at.t(s)], **at.rest(s)
    ),
    "gather": lambda s, at: dist.gather(at.t(s), at.root_only(s), s["rank"], **at.rest(s)),
    "scatter": lambda s, at: dist.scatter(at.t(s), at.root_only(s), s["rank"], **at.rest(s)),
    "reduce_scatter": lambda s, at: dist.reduce_scatter(
        at.t(s), at.each(s), at.op(s), **at.rest(s)
    ),
    "reduce_scatter_tensor": lambda s, at: dist.reduce_scatter_tensor(
        at.t(s), at.whole(s), at.op(s), **at.rest(s)
    ),
    "all_to_all": lambda s, at: dist.all_to_all(at.each(s), at.each(s), **at.rest(s)),
    "all_to_all_single": lambda s, at: dist.all_to_all_single(
        at.t(s, "other"), at.t(s), s["splits"], s["splits"], **at.rest(s)
    ),
    "barrier": lambda s, at: dist.barrier(at.group(s), s["async"]),
    "barrier, timeout": lambda s, at: dist.barrier(at.group(s), timeout=s["timeout"]),
    "monitored_barrier": lambda s, at: dist.monitored_barrier(at.group(s), s["timeout"]),
    "ring": lambda s, at: at.ring(s),
    "cancelled": lambda s, at: at.cancelled(s),
    "P2POp": lambda s, at: dist.P2POp(dist.irecv, at.t(s), s["rank"], at.group(s), tag=s["tag"]),
    "broadcast_object_list": lambda s, at: dist.broadcast_object_list(
        [at.object(s)] * 2, s["rank"], at.group(s)
    ),
    "all_gather_object": lambda s, at: dist.all_gather_object(
        [None] * (at.size(s) + s["longer"]), at.object(s), at.group(s)
    ),
    "gather_object": lambda s, at: dist.gather_object(
        at.object(s), [None] * at.size(s) if at.is_root(s) else None, s["rank"], at.group(s)
    ),
    "scatter_object_list": lambda s, at: dist.scatter_object_list(
        [None], [at.object(s)] * (at.size(s) + s["longer"]), s["rank"], at.group(s)
    ),
    "new_group": lambda s, at: at.made.append(dist.new_group(s["ranks"])),
    "new_group, timeout": lambda s, at: dist.new_group(s["ranks"], timeout=s["timeout"]),
    "split_group": lambda s, at: dist.split_group(at.group(s), [s["ranks"]]),
    "init_process_group": lambda s, at: dist.init_process_group(rank=s["rank"]),
    "queries": lambda s, at: (
        dist.get_rank(at.group(s)),
        dist.get_group_rank(at.group(s), s["rank"]),
        dist.get_global_rank(at.group(s), s["rank"]),
        dist.get_process_group_ranks(at.group(s)),
        dist.get_backend(at.group(s)),
    ),
    "Work": lambda s, at: at.about_work(s),
    "drop": lambda s, at: at.works.clear(),
    "wait": lambda s, at: at.wait(s),
    "options": lambda s, at: dist.MPIOptions(comm=s["rank"], check=s["op"]),
    "new_subgroups": lambda s, at: dist.new_subgroups(s["tag"], at.group(s)),
}


@st.composite
def _step(draw: Any) -> dict[str, Any]:
    step = {"name": draw(st.sampled_from(sorted(CALLS)))}
    step |= {field: draw(strategy) for field, strategy in _fields.items()}
    # One rank differs, in one thing: rarely, because the others then often wait for it in vain.
    field = draw(st.sampled_from([None] * 40 + sorted(_fields)))
    if field is not None:
        step |= {
            "odd": field,
            "odd rank": draw(st.integers(0, 3)),
            "odd value": draw(_fields[field]),
        }
    return step


programs = st.lists(_step(), min_size=1, max_size=12)


def tensor(kind: str, dtype: str, shape: tuple[int, ...]) -> Any:
    """What a step passes as a tensor."""
    real = getattr(torch, dtype)
    if kind == "torch":
        return torch.zeros(shape, dtype=real)
    if kind == "numpy":
        return np.zeros(shape, dtype if hasattr(np, dtype) else "float32")
    if kind == "turned":
        return torch.zeros(shape[::-1], dtype=real).permute(*range(len(shape))[::-1])
    made = {
        "gaps": lambda: torch.zeros(6, dtype=real)[::2],
        "expanded": lambda: torch.zeros(1).expand(4),
        "sparse": lambda: torch.zeros(4).to_sparse(),
        "meta": lambda: torch.zeros(shape, device="meta"),
        "leaf": lambda: torch.zeros(shape, requires_grad=True),
        "conjugate": lambda: torch.zeros(shape, dtype=torch.complex64).conj(),
        "bytes": lambda: b"abcd",
        "bytearray": lambda: bytearray(8),
        "read-only": lambda: np.broadcast_to(np.zeros(1), (4,)),
        "None": lambda: None,
        "text": lambda: "text",
        "list": lambda: [1, 2],
    }
    return made[kind]()


class Place:
    """Where a program runs: its groups and Works."""

    def __init__(self, first: Any, single: Any, closed: Any) -> None:
        outside = dist.GroupMember.NON_GROUP_MEMBER
        self.groups = {"first": first, "single": single, "closed": closed, "outside": outside}
        self.groups |= {"world": None, 17: 17}
        self.works: list[Any] = []
        self.made: list[Any] = []

    def group(self, s: dict) -> Any:
        return self.groups[s["group"]]

    def rest(self, s: dict) -> dict[str, Any]:
        return {"group": self.group(s), "async_op": s["async"]}

    def size(self, s: dict) -> int:
        return max(1, dist.get_world_size(self.group(s)))

    def t(self, s: dict, field: str = "tensor") -> Any:
        return tensor(*s[field])

    def each(self, s: dict) -> list[Any]:
        return [self.t(s) for _ in range(self.size(s) + s["longer"])]

    def whole(self, s: dict) -> Any:
        kind, dtype, shape = s["tensor"]
        rows = (shape[0] if shape else 1) * self.size(s) + s["longer"]
        return tensor(kind, dtype, (max(0, rows), *shape[1:]))

    def op(self, s: dict) -> Any:
        name = s["op"]
        if name == "PREMUL":
            return ReduceOp.PREMUL_SUM(0.5)
        return (
            getattr(ReduceOp, name)
            if isinstance(name, str) and name.isupper() and hasattr(ReduceOp, name)
            else name
        )

    def is_root(self, s: dict) -> bool:
        return s["rank"] == dist.get_rank(self.group(s))

    def root_only(self, s: dict) -> list[Any] | None:
        return self.each(s) if self.is_root(s) else None

    def object(self, s: dict) -> Any:
        return OBJECTS[s["object"]]

    def ring(self, s: dict) -> None:
        """Everybody sends to the next rank and receives from the one before."""
        group = self.group(s)
        size, rank = self.size(s), dist.get_rank(group)
        batch = [
            dist.P2POp(
                dist.irecv, self.t(s), group=group, tag=s["tag"], group_peer=(rank - 1) % size
            ),
            dist.P2POp(
                dist.isend, self.t(s), group=group, tag=s["tag"], group_peer=(rank + 1) % size
            ),
        ]
        self.works += dist.batch_isend_irecv(batch)

    def cancelled(self, s: dict) -> None:
        work = dist.irecv(self.t(s), s["rank"], self.group(s), tag=s["tag"])
        if work is not None:
            work.cancel()
            work.wait()

    def wait(self, s: dict) -> None:
        for work in self.works:
            work.wait(s["timeout"])

    def about_work(self, s: dict) -> None:
        for work in self.works:
            work.is_completed()
            repr(work)
            work.source_rank()
            if work.is_completed():
                work.is_success()
                work.exception()
                work.result()
            if s["async"]:
                work.get_future()
            work.cancel()


class Runner:
    """Runs programs on all ranks, in groups of their own that are made anew for each."""

    def __init__(self, timeout: float) -> None:
        self.control = _engine.Comm.world("fuzz", 600.0, 1)
        self.timeout = timeout
        self.calls = 0
        self.problem = ""  # the first one, the same on all ranks
        self.outcomes: dict[str, int] = {}

    def close(self) -> None:
        self.control.free()

    def _share(self, program: Any) -> Any:
        """What rank 0 has, on all ranks."""
        data = np.frombuffer(pickle.dumps(program), np.uint8).copy()
        size = np.array([data.size], np.int64)
        self.control.broadcast(size, 0)
        if self.control.rank:
            data = np.empty(int(size[0]), np.uint8)
        self.control.broadcast(data, 0)
        return pickle.loads(data.tobytes())

    def _worst(self, problem: str) -> str:
        """The problem of the first rank that has one."""
        data = np.zeros(4000, np.uint8)
        text = problem.encode()[:4000]
        data[: len(text)] = np.frombuffer(text, np.uint8)
        every = np.empty((self.control.size, 4000), np.uint8)
        self.control.all_gather_into_tensor(every, data)
        texts = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in every]
        return next((f"rank {rank}: {text}" for rank, text in enumerate(texts) if text), "")

    def lead(self, program: list[dict]) -> None:
        """Rank 0: run a program with the others; AssertionError if anything undocumented came."""
        self._share(program)
        problem = self._worst(self._run(program))
        self.problem = self.problem or problem
        assert not problem, f"{problem}\nin the program {program}"

    def follow(self) -> None:
        """The other ranks: run what rank 0 says until it stops."""
        while (program := self._share(None)) is not None:
            problem = self._worst(self._run(program))
            self.problem = self.problem or problem

    def stop(self) -> None:
        self._share(None)

    def _run(self, program: list[dict]) -> str:
        rank = self.control.rank
        world = dist.group.WORLD
        usual = world.timeout
        place = None
        problem = ""
        try:
            single = dist.new_group([rank])
            closed = dist.new_group([rank])
            dist.destroy_process_group(closed)
            place = Place(dist.new_group(), single, closed)
            world.timeout = place.groups["first"].timeout = timedelta(seconds=self.timeout)
            for number, step in enumerate(program):
                own = dict(step)
                if "odd" in step and rank == step["odd rank"] % self.control.size:
                    own[step["odd"]] = step["odd value"]
                outcome = "done"
                try:
                    work = CALLS[own["name"]](own, place)
                    if isinstance(work, dist.Work):
                        place.works.append(work)
                except DOCUMENTED as error:
                    outcome = type(error).__name__
                except Exception:
                    problem = problem or f"step {number}, {own}:\n{traceback.format_exc()}"
                self.calls += 1
                self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
            for work in place.works:
                try:
                    work.wait()
                except DOCUMENTED:
                    pass
            return problem or self._tidy(place)
        except Exception:
            return problem or traceback.format_exc()
        finally:
            world.timeout = usual

    def _tidy(self, place: Place) -> str:
        """Destroy what was made, and find the world in step again."""
        groups = [g for g in [*place.made, place.groups["single"], place.groups["first"]] if g]
        place.works.clear()
        for group in groups:
            try:
                if group is not dist.GroupMember.NON_GROUP_MEMBER:
                    dist.destroy_process_group(group)
            except DOCUMENTED:
                pass
        return self._in_step()

    def _in_step(self) -> str:
        """Let who is behind in the world catch up; then one barrier must do."""
        native = dist.group.WORLD.carrier
        begun = np.array([native.seq], np.int64)
        self.control.all_reduce(begun, ReduceOp.MAX)
        for _ in range(int(begun[0]) - native.seq):
            try:  # the others have given up on it
                dist.barrier()
                return "a collective that others gave up on has succeeded"
            except dist.DistError:
                pass
        try:
            self.control.barrier()
            dist.barrier()
        except dist.DistError as error:
            return f"the world group is out of step: {error}"
        return ""
