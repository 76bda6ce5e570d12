"""Verifies before training that all ranks have the same module.

There are two steps. The ranks first exchange a digest of fixed size; if all digests are the same,
that is all. Otherwise the ranks exchange the full descriptions, and every rank finds, and raises,
the same first difference.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import numpy as np
import torch

from hpcdist.errors import DistMismatchError

__all__ = ["Comparison", "describe"]

API = "DistributedDataParallel"

# The digest message: length of the description in bytes, then 32 bytes of hash, as five int64.
_WORDS = 5

_Entry = list[Any]
_FACTS = ("layout", "shape", "stride", "dtype", "device", "requires_grad")
_MAX_LINES = 8


def describe(kind: str, named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[_Entry]:
    """Describe what must agree between ranks.

    Parameters
    ----------
    kind : str
        ``"parameter"`` or ``"buffer"``; appears in messages.
    named : iterable of (str, torch.Tensor)
        Full names and tensors.

    Yields
    ------
    list
        One ``[kind, name, {fact: text}]`` per tensor, plain enough for JSON. Local.
    """
    for name, tensor in named:
        if torch.nn.parameter.is_lazy(tensor):
            facts = {"shape": "not known before the first forward"}
        elif tensor.layout != torch.strided:
            facts = {"shape": str(tuple(tensor.shape)), "layout": str(tensor.layout)}
        else:
            facts = {
                "shape": str(tuple(tensor.shape)),
                # The stride of a dimension of size 1 has no meaning and may differ.
                "stride": str(
                    tuple(
                        0 if n == 1 else st
                        for st, n in zip(tensor.stride(), tensor.shape, strict=True)
                    )
                ),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "device": tensor.device.type,
            }
        facts["requires_grad"] = str(tensor.requires_grad)
        yield [kind, name, facts]


class Comparison:
    """Verifies that `entries` yields the same on all ranks of the group.

    Parameters
    ----------
    group : ProcessGroup
        All of its ranks must call :meth:`verify`.
    entries : callable
        Yields entries of :func:`describe` and ``["argument", name, {"value": text}]``; the same
        ones on each call. Many parameters make a long text, of which only one entry is in memory
        unless ranks differ.
    """

    def __init__(self, group: Any, entries: Callable[[], Iterable[_Entry]]) -> None:
        self._group, self._entries = group, entries
        self._mine = np.zeros(_WORDS, np.int64)
        self._rows = np.zeros((group.size(), _WORDS), np.int64)

    def agrees(self) -> bool:
        """Whether all received digests are the same."""
        return bool((self._rows == self._mine).all())

    def verify(self) -> None:
        """Compare; one collective, or two where the ranks differ.

        Raises
        ------
        DistMismatchError
            On every rank, with the same text: the ranks that differ from the majority, and for each
            of them the first entry that differs.
        """
        digest, length = hashlib.blake2b(digest_size=32), 0
        for entry in self._entries():
            line = _line(entry)
            digest.update(line)
            length += len(line)
        words = length.to_bytes(8, "little") + digest.digest()
        self._mine[:] = np.frombuffer(words, np.int64)
        self._group._comm.all_gather_into_tensor(self._rows, self._mine, api=API)
        if not self.agrees():
            self._differ()

    def _differ(self) -> NoReturn:
        text = b"".join(map(_line, self._entries()))
        lengths = self._rows[:, 0].tolist()
        longest, size = max(lengths), len(lengths)
        padded = np.zeros(longest, np.uint8)
        padded[: len(text)] = np.frombuffer(text, np.uint8)
        gathered = np.empty((size, longest), np.uint8)
        self._group._comm.all_gather_into_tensor(gathered, padded, api=API)
        texts = [gathered[r, : lengths[r]].tobytes().decode() for r in range(size)]
        raise DistMismatchError(_report(texts, self._group))


def _line(entry: _Entry) -> bytes:
    return json.dumps(entry).encode() + b"\n"


def _report(texts: list[str], group: Any) -> str:
    """Return which ranks differ from the majority, and where first."""
    usual, _ = max(Counter(texts).items(), key=lambda item: (item[1], -texts.index(item[0])))
    reference = texts.index(usual)
    lines = [
        _first_difference(_parse(text), rank, _parse(usual), reference, group)
        for rank, text in enumerate(texts)
        if text != usual
    ]
    more = len(lines) - _MAX_LINES
    if more > 0:
        lines[_MAX_LINES:] = [f"and {more} more ranks"]
    return (
        f"DDP expects same model across all ranks of group {group.name}, but "
        + "; ".join(lines)
        + ". Build the module in the same way, and pass the same arguments, on every rank."
    )


def _parse(text: str) -> list[_Entry]:
    return [json.loads(line) for line in text.splitlines()]


def _first_difference(
    theirs: list[_Entry], rank: int, usual: list[_Entry], reference: int, group: Any
) -> str:
    """Describe the first entry in which two ranks differ."""
    who, other = f"rank {group._ranks[rank]}", f"rank {group._ranks[reference]}"
    counts = [sum(entry[0] == "parameter" for entry in side) for side in (theirs, usual)]
    start = who
    if counts[0] != counts[1]:
        start = f"{who} has {counts[0]} params, while {other} has {counts[1]} params: {who}"
    for (kind, name, facts), (kind2, name2, facts2) in zip(theirs, usual, strict=False):
        if (kind, name) != (kind2, name2):
            return f"{start} has {kind} '{name}' where {other} has {kind2} '{name2}'"
        if facts != facts2:
            differing = [fact for fact in (*_FACTS, "value") if facts.get(fact) != facts2.get(fact)]
            here = ", ".join(f"{fact} {facts.get(fact)}" for fact in differing)
            there = ", ".join(f"{fact} {facts2.get(fact)}" for fact in differing)
            return f"{start} has {kind} '{name}' with {here}, {other} with {there}"
    longer = theirs if len(theirs) > len(usual) else usual
    kind, name, _ = longer[min(len(theirs), len(usual))]
    verb = "has" if longer is theirs else "lacks"
    return f"{start} {verb} {kind} '{name}', which {other} {'lacks' if verb == 'has' else 'has'}"
