"""Compares between ranks what they must have in common, before it is used.

There are two steps. The ranks first exchange a digest of fixed size; if all digests are the same,
that is all. Otherwise the ranks exchange the full descriptions, and every rank finds, and raises,
the same first difference.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from enum import Enum
from typing import Any, NoReturn

import numpy as np

from hpcdist.errors import DistMismatchError

# The digest message: length of the description in bytes, then 32 bytes of hash, as five int64.
_WORDS = 5
_MAX_LINES = 8

#: The types whose text is their value.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum, np.generic, timedelta)
_PLAIN_OF_TORCH = ("torch.dtype", "torch.device")

#: ``[kind, name, {fact: text}]``, plain enough for JSON.
Entry = list[Any]


def digest(*facts: Any) -> int:
    """Return a number for what `repr` shows of facts: an operation's `extra`, as its errors tell.

    It costs no message. Ranks that differ see two numbers: :func:`naming` adds what they are of.
    """
    return 1 << 32 | zlib.crc32(repr(facts).encode())


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Add to a DistMismatchError of the block what its digest is of, on this rank."""
    try:
        yield
    except DistMismatchError as error:
        if "digest of the arguments" in str(error):
            error.args = (f"{error}\nThe digest is that of {what}.",)
        raise


def arguments(facts: Mapping[str, Any]) -> Iterator[Entry]:
    """Yield an entry for each argument, by its name.

    Numbers, texts, dtypes and the like, also in containers and dataclasses, must have the same
    value; of other objects, whose texts may contain an address, only the type is compared.
    """
    for name, value in facts.items():
        text = str(value) if isinstance(value, str) else _shown(value)
        yield ["argument", name, {"value": text}]


def _shown(value: Any) -> str:
    """Return a text that is the same in all processes that have the same value."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_shown(k)}: {_shown(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        text = ", ".join(map(_shown, value))
        return f"({text})" if isinstance(value, tuple) else f"[{text}]"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(_shown, value))) + "}"
    if isinstance(value, type):
        return _name(value)
    if dataclasses.is_dataclass(value):
        fields = (field.name for field in dataclasses.fields(value))
        shown = ", ".join(f"{name}={_shown(getattr(value, name, None))}" for name in fields)
        return f"{type(value).__name__}({shown})"
    if isinstance(value, _PLAIN) or _name(type(value)) in _PLAIN_OF_TORCH:
        return str(value) if isinstance(value, (Enum, np.generic)) else repr(value)
    return f"a {_name(type(value))}"


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def same_arguments(group: Any, api: str, facts: Mapping[str, Any]) -> None:
    """Verify that all ranks give the same arguments; all must call it. One collective.

    Raises
    ------
    DistMismatchError
        On all ranks, if they do not.
    """
    expected, advice = f"{api} expects the same arguments", "Give them on every rank"
    Comparison(group, api, expected, advice, lambda: arguments(facts)).verify()


class Comparison:
    """Verifies that `entries` yields the same on all ranks of the group.

    Parameters
    ----------
    group : ProcessGroup
        All of its ranks must call :meth:`verify`.
    api : str
        Public name of what is compared.
    expected, advice : str
        Beginning and end of an error: "DDP expects same model", "Build the module in the same way".
    entries : callable
        Yields entries, the same ones on each call. Many parameters make a long text, of which only
        one entry is in memory unless ranks differ.
    """

    def __init__(
        self,
        group: Any,
        api: str,
        expected: str,
        advice: str,
        entries: Callable[[], Iterable[Entry]],
    ) -> None:
        self._group, self._api, self._entries = group, api, entries
        self._expected, self._advice = expected, advice
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
        self._group.carrier.all_gather_into_tensor(self._rows, self._mine, api=self._api)
        if not self.agrees():
            self._differ()

    def _differ(self) -> NoReturn:
        text = b"".join(map(_line, self._entries()))
        lengths = self._rows[:, 0].tolist()
        longest, size = max(lengths), len(lengths)
        padded = np.zeros(longest, np.uint8)
        padded[: len(text)] = np.frombuffer(text, np.uint8)
        gathered = np.empty((size, longest), np.uint8)
        self._group.carrier.all_gather_into_tensor(gathered, padded, api=self._api)
        texts = [gathered[r, : lengths[r]].tobytes().decode() for r in range(size)]
        raise DistMismatchError(self._report(texts))

    def _report(self, texts: list[str]) -> str:
        """Return which ranks differ from the majority, and where first."""
        usual, _ = max(Counter(texts).items(), key=lambda item: (item[1], -texts.index(item[0])))
        reference = texts.index(usual)
        lines = [
            _first_difference(_parse(text), rank, _parse(usual), reference, self._group)
            for rank, text in enumerate(texts)
            if text != usual
        ]
        more = len(lines) - _MAX_LINES
        if more > 0:
            lines[_MAX_LINES:] = [f"and {more} more ranks"]
        return (
            f"{self._expected} across all ranks of group {self._group.name}, but "
            f"{'; '.join(lines)}. {self._advice}."
        )


def _line(entry: Entry) -> bytes:
    return json.dumps(entry).encode() + b"\n"


def _parse(text: str) -> list[Entry]:
    return [json.loads(line) for line in text.splitlines()]


def _first_difference(
    theirs: list[Entry], rank: int, usual: list[Entry], reference: int, group: Any
) -> str:
    """Describe the first entry in which two ranks differ."""
    who, other = f"rank {group.members.ranks[rank]}", f"rank {group.members.ranks[reference]}"
    counts = [sum(entry[0] == "parameter" for entry in side) for side in (theirs, usual)]
    start = who
    if counts[0] != counts[1]:
        start = f"{who} has {counts[0]} params, while {other} has {counts[1]} params: {who}"
    for (kind, name, facts), (kind2, name2, facts2) in zip(theirs, usual, strict=False):
        if (kind, name) != (kind2, name2):
            return f"{start} has {kind} '{name}' where {other} has {kind2} '{name2}'"
        if facts != facts2:
            differing = [
                fact for fact in {**facts, **facts2} if facts.get(fact) != facts2.get(fact)
            ]
            here = ", ".join(f"{fact} {facts.get(fact)}" for fact in differing)
            there = ", ".join(f"{fact} {facts2.get(fact)}" for fact in differing)
            return f"{start} has {kind} '{name}' with {here}, {other} with {there}"
    longer = theirs if len(theirs) > len(usual) else usual
    kind, name, _ = longer[min(len(theirs), len(usual))]
    verb = "has" if longer is theirs else "lacks"
    return f"{start} {verb} {kind} '{name}', which {other} {'lacks' if verb == 'has' else 'has'}"
