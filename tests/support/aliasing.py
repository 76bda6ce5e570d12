"""Generated calls whose tensors share memory: every operation with every overlap that it can have.

A rank's tensors are pieces of one block of memory. Where they lie is a pure function of the rank,
so each rank knows what all ranks pass, and computes with NumPy what must come out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

import hpcdist as dist

Arrays = list[np.ndarray]


@dataclass(frozen=True)
class Shape:
    """How long the inputs and outputs of an operation are, on one rank."""

    ins: list[int]
    outs: list[int]


@dataclass(frozen=True)
class Operation:
    """An operation as the tensors it reads and writes.

    ``shape(rank, size, n)`` says how long they are; ``call`` makes it; ``expect(inputs, rank,
    size)`` has the outputs, from all ranks' inputs.
    """

    shape: Callable[[int, int, int], Shape]
    call: Callable[[list[Any], list[Any], int, bool], Any]
    expect: Callable[[list[Arrays], int, int], Arrays]
    one_input: bool = False  # its inputs lie in one tensor, one behind the other
    one_output: bool = False
    in_place: bool = False  # it has no inputs beside its outputs


@dataclass(frozen=True)
class Overlap:
    """Tensor `first` begins `shift` elements behind where tensor `second` does."""

    what: str  # "apart", "input in output", "outputs"
    first: int = 0
    second: int = 0
    shift: int = 0


def _length(rank: int, n: int, even: bool) -> int:
    return n if even else n + rank


def _lists(even: bool) -> dict[str, Operation]:
    """Operations with a list; in the uneven ones the rank's number is added to its size."""

    def all_of(size: int, n: int) -> list[int]:
        return [_length(r, n, even) for r in range(size)]

    def column(inputs: list[Arrays], i: int = 0) -> Arrays:
        return [each[i] for each in inputs]

    def total(inputs: list[Arrays], rank: int) -> np.ndarray:
        return sum(each[rank] for each in inputs[1:]) + inputs[0][rank]  # type: ignore[no-any-return]

    root = 1  # modulo the group's size

    def gathered(rank: int, size: int, n: int) -> Shape:
        return Shape([_length(rank, n, even)], all_of(size, n) if rank == root % size else [])

    def scattered(rank: int, size: int, n: int) -> Shape:
        return Shape(all_of(size, n) if rank == root % size else [], [_length(rank, n, even)])

    def at_root(found: Arrays, rank: int, size: int) -> Arrays:
        return found if rank == root % size else []

    return {
        "all_gather": Operation(
            lambda r, s, n: Shape([_length(r, n, even)], all_of(s, n)),
            lambda i, o, s, a: dist.all_gather(o, i[0], async_op=a),
            lambda x, r, s: column(x),
        ),
        "all_gather_coalesced": Operation(
            lambda r, s, n: Shape([_length(r, n, even)] * 2, all_of(s, n) * 2),
            lambda i, o, s, a: dist.all_gather_coalesced(
                [[o[r], o[s + r]] for r in range(s)], i, async_op=a
            ),
            lambda x, r, s: column(x) + column(x, 1),
        ),
        "gather": Operation(
            gathered,
            lambda i, o, s, a: dist.gather(i[0], o or None, root % s, async_op=a),
            lambda x, r, s: at_root(column(x), r, s),
        ),
        "scatter": Operation(
            scattered,
            lambda i, o, s, a: dist.scatter(o[0], i or None, root % s, async_op=a),
            lambda x, r, s: [x[root % s][r]],
        ),
        "reduce_scatter": Operation(
            lambda r, s, n: Shape(all_of(s, n), [_length(r, n, even)]),
            lambda i, o, s, a: dist.reduce_scatter(o[0], i, async_op=a),
            lambda x, r, s: [total(x, r)],
        ),
        "all_to_all": Operation(
            lambda r, s, n: Shape(
                [n if even else n + r + q for q in range(s)],
                [n if even else n + r + q for q in range(s)],
            ),
            lambda i, o, s, a: dist.all_to_all(o, i, async_op=a),
            lambda x, r, s: [each[r] for each in x],
        ),
    }


def _singles() -> dict[str, Operation]:
    """Operations on one tensor with a block for each rank."""

    def blocks(inputs: list[Arrays], rank: int, size: int) -> Arrays:
        return [each[0].reshape(size, -1)[rank] for each in inputs]

    return {
        "all_gather_into_tensor": Operation(
            lambda r, s, n: Shape([n], [n] * s),
            lambda i, o, s, a: dist.all_gather_into_tensor(o[0], i[0], async_op=a),
            lambda x, r, s: [np.concatenate([each[0] for each in x])],
            one_output=True,
        ),
        "reduce_scatter_tensor": Operation(
            lambda r, s, n: Shape([n] * s, [n]),
            lambda i, o, s, a: dist.reduce_scatter_tensor(o[0], i[0], async_op=a),
            lambda x, r, s: [np.sum(blocks(x, r, s), axis=0)],
            one_input=True,
        ),
        "reduce_scatter_tensor, block by block": Operation(
            lambda r, s, n: Shape([n] * s, [n]),
            lambda i, o, s, a: dist.reduce_scatter_tensor(
                o[0], i[0], dist.ReduceOp.PREMUL_SUM(2.0), async_op=a
            ),
            lambda x, r, s: [2 * np.sum(blocks(x, r, s), axis=0)],
            one_input=True,
        ),
        "all_to_all_single": Operation(
            lambda r, s, n: Shape([n] * s, [n] * s),
            lambda i, o, s, a: dist.all_to_all_single(o[0], i[0], async_op=a),
            lambda x, r, s: [np.concatenate(blocks(x, r, s))],
            one_input=True,
            one_output=True,
        ),
        "all_reduce_coalesced": Operation(
            lambda r, s, n: Shape([], [n, n, n]),
            lambda i, o, s, a: dist.all_reduce_coalesced(o, async_op=a),
            lambda x, r, s: [np.sum([each[k] for each in x], axis=0) for k in range(3)],
            in_place=True,
        ),
    }


def operations() -> Iterator[tuple[str, Operation]]:
    """Label and operation, even and uneven."""
    yield from _singles().items()
    yield from _lists(True).items()
    for name, operation in _lists(False).items():
        yield f"{name}, uneven", operation


def overlaps(operation: Operation, rank: int, size: int, n: int) -> Iterator[Overlap]:
    """Every overlap of two tensors, by as much as all and by half; as many on each rank.

    Where there is one tensor a rank, `first` or `second` count from this rank's own.
    """
    yield Overlap("apart")
    shape = operation.shape(rank, size, n)
    ins, outs = len(shape.ins), len(shape.outs)
    for shift in (0, n // 2):
        for i in range(max(len(operation.shape(r, size, n).ins) for r in range(size))):
            for k in range(max(len(operation.shape(r, size, n).outs) for r in range(size))):
                here = i < max(ins, 1) and k < max(outs, 1) and ins and outs
                yield Overlap("input in output", i, k, shift) if here else Overlap("apart")
        if operation.one_output:
            continue
        for k in range(1, max(len(operation.shape(r, size, n).outs) for r in range(size))):
            yield Overlap("outputs", k, k - 1, shift) if k < outs else Overlap("apart")


@cache
def filled(seed: int, room: int) -> np.ndarray:
    """Random whole numbers; not to be written to."""
    return np.random.default_rng(seed).integers(0, 1000, room).astype(np.float64)


@dataclass
class Case:
    """The tensors of one rank in one case."""

    memory: np.ndarray
    ins: Arrays
    outs: Arrays

    @classmethod
    def make(cls, operation: Operation, overlap: Overlap, rank: int, size: int, n: int) -> Case:
        """Lay out and fill a rank's tensors."""
        shape = operation.shape(rank, size, n)
        room = sum(shape.ins) + sum(shape.outs) + 2 * n
        memory = filled(1000 * rank + n, room).copy()
        ends_out, ends_in = np.cumsum([0, *shape.outs]), np.cumsum([0, *shape.ins])
        out_at = [int(at) for at in ends_out[:-1]]
        in_at = [int(at) + int(ends_out[-1]) + n for at in ends_in[:-1]]
        if overlap.what == "input in output":
            moved = out_at[overlap.second] + overlap.shift
            if operation.one_input:  # the whole moves, so that this block comes to lie there
                by = moved - in_at[overlap.first]
                in_at = [at + by for at in in_at]
                lowest = min(*in_at, 0)
                in_at, out_at = [at - lowest for at in in_at], [at - lowest for at in out_at]
                more = max(in_at) + max(shape.ins) + max(out_at) + n - memory.size
                memory = np.concatenate([memory, np.arange(max(more, 0), dtype=np.float64)])
            else:
                in_at[overlap.first] = moved
        if overlap.what == "outputs":
            out_at[overlap.first] = out_at[overlap.second] + overlap.shift

        def pieces(places: list[int], lengths: list[int], whole: bool) -> Arrays:
            if whole and places:
                return [memory[places[0] : places[0] + sum(lengths)]]
            return [memory[at : at + k] for at, k in zip(places, lengths, strict=True)]

        ins = pieces(in_at, shape.ins, operation.one_input)
        return cls(memory, ins, pieces(out_at, shape.outs, operation.one_output))

    def read(self, operation: Operation) -> Arrays:
        """Copies of what the operation reads."""
        return [each.copy() for each in (self.outs if operation.in_place else self.ins)]

    def tensors(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The inputs and outputs for the call."""
        return [torch.from_numpy(x) for x in self.ins], [torch.from_numpy(x) for x in self.outs]

    def pieces_of(self, block: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The same inputs and outputs as parts of a tensor that is as long as the memory."""

        def part(array: np.ndarray) -> torch.Tensor:
            at = (array.__array_interface__["data"][0] - self.memory.ctypes.data) // 8
            return block[at : at + array.size]

        return [part(x) for x in self.ins], [part(x) for x in self.outs]

    def elsewhere(self) -> np.ndarray:
        """Which elements of the memory no output covers."""
        covered = np.zeros(self.memory.size, bool)
        for each in self.outs:
            at = (each.__array_interface__["data"][0] - self.memory.ctypes.data) // 8
            covered[at : at + each.size] = True
        return ~covered


def outcome(operation: Operation, tensors: Any, size: int, later: bool) -> Exception | None:
    """Make the call; the exception if there was one."""
    try:
        work = operation.call(*tensors, size, later)
        if work is not None:
            work.wait()
    except (ValueError, dist.DistError) as error:
        return error
    return None


def wrong(
    case: Case, operation: Operation, inputs: list[Arrays], before: np.ndarray, rank: int, size: int
) -> str:
    """What is not as the reference has it."""
    wanted = operation.expect(inputs, rank, size)
    for k, (found, right) in enumerate(zip(case.outs, wanted, strict=True)):
        if not np.array_equal(found, right):
            return f"output {k} is {found[:8]}, not {right[:8]}"
    rest = case.elsewhere()
    if not np.array_equal(case.memory[rest], before[rest]):
        return "memory outside the outputs was changed"
    return ""


def judge(
    name: str,
    operation: Operation,
    everybody: list[Case],
    call: Callable[[Case], Exception | None],
    rank: int,
    rule: Callable[[str, Case, int, int], bool] | None = None,  # by default `refused`
) -> str:
    """What is wrong with a call on this rank; `call` makes it and leaves what came in the case."""
    size, case = len(everybody), everybody[rank]
    inputs = [each.read(operation) for each in everybody]
    who = [r for r in range(size) if (rule or refused)(name, everybody[r], r, size)]
    before = case.memory.copy()
    error = call(case)
    if not who:
        return str(error) if error else wrong(case, operation, inputs, before, rank, size)
    text = ""
    if rank in who:
        fits = isinstance(error, ValueError) and (
            "overlap" in str(error) or "lies in" in str(error)
        )
        text = "" if fits else f"not refused: {error}"
    elif not isinstance(error, dist.DistError):
        text = f"not told: {error}"
    if not np.array_equal(case.memory, before):
        text = f"{text}; a refused call changed memory"
    return text


def refused(name: str, case: Case, rank: int, size: int) -> bool:
    """Whether this rank must refuse its arguments."""
    shared = np.may_share_memory  # of contiguous arrays it is exact
    ins, outs = case.ins, case.outs
    if any(shared(one, outs[k]) for i, one in enumerate(outs) for k in range(i)):
        return True
    if name.startswith("all_to_all_single"):
        return bool(shared(ins[0], outs[0]))
    if name.startswith("all_to_all"):
        own = (rank, rank) if ins[rank].ctypes.data == outs[rank].ctypes.data else None
        pairs = [(i, k) for i in range(size) for k in range(size) if (i, k) != own]
        return any(shared(ins[i], outs[k]) for i, k in pairs)
    if name.startswith("all_gather_coalesced"):  # in the place of this rank's other tensor
        return any(shared(ins[i], outs[(1 - i) * size + rank]) for i in (0, 1))
    return False


def refused_by_nccl(name: str, case: Case, rank: int, size: int) -> bool:
    """The same over NCCL, which moves what is in its own place and copies nothing."""
    shared, root = np.may_share_memory, 1 % size
    ins, outs = case.ins, case.outs
    if any(shared(one, outs[k]) for i, one in enumerate(outs) for k in range(i)):
        return True
    own = {"all_gather": (0, rank), "gather": (0, root), "scatter": (root, 0)}
    own |= {"reduce_scatter": (rank, 0), "all_to_all": (rank, rank)}
    place = own.get(name.partition(",")[0])
    for i, one in enumerate(ins):
        for k, other in enumerate(outs):
            if not shared(one, other):
                continue
            by = (one.ctypes.data - other.ctypes.data) // 8
            if name == "all_gather_into_tensor" and by == rank * one.size:
                continue
            if name == "reduce_scatter_tensor" and by == -rank * other.size:
                continue
            if name.startswith("all_gather_coalesced") and by == 0 and k == i * size + rank:
                continue
            if by or place != (i, k):
                return True
    return False
