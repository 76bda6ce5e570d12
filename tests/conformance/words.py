"""Errors that the suite expects in gloo's words, and how hpcdist says the same."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any


def _came_not(found: re.Match[str]) -> str:
    return rf"monitored_barrier.* ranks? {found[1]}\b"


#: gloo's text, and what stands for it: the same ranks and the same fault.
_WORDS: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
    (r"Ranks? ([\d, ]+) failed to pass monitoredBarrier", _came_not),
    (
        r"Rank (\d+) successfully reached monitoredBarrier,.*",
        r"monitored_barrier.*this is rank \1 of",
    ),
    (
        r"Rank (\d+) timed out in monitoredBarrier",
        r"monitored_barrier.*this is rank \1 of",
    ),
    (r"Rank (\d+)", r"monitored_barrier.* ranks? \1\\b"),
    (r" \(Timed out\|closed\|timeout\) ", "timeout after"),
    (r"Timed out waiting 1ms", "timeout after 0"),
]


#: What torch's Python code raises, and what the native module raises for the same fault.
_NATIVE: list[tuple[Any, str, Any, str]] = [
    (
        ValueError,
        "all_reduce does not support",
        TypeError,
        "of complex numbers is not offered|has no meaning for complex numbers|combines bits",
    ),
    (
        ValueError,
        "Invalid process group specified",
        ValueError,
        "process is not in the given group",
    ),
    (ValueError, r"Rank (\d+|-\\d\+) is out of range", ValueError, "is outside the world of size"),
    (ValueError, "must not exceed", ValueError, "group_size=100 does not divide the"),
    (
        ValueError,
        "Rank 1 has appeared in both subgroup",
        ValueError,
        r"rank 1 is in both \\[1, 2\\] and \\[1, 3\\]",
    ),
    (ValueError, r"The.+must.+be.+divisible.+", ValueError, "group_size=3 does not divide the"),
    (
        ValueError,
        "Expected argument scatter_object_output_list to be a list of size at least 1.",
        ValueError,
        "scatter_object_output_list must be a list of at least one item",
    ),
    (
        RuntimeError,
        r"Rank (\d+) exhausted all inputs",
        RuntimeError,
        r"rank \1 exhausted all inputs",
    ),
    (
        RuntimeError,
        "Detected at least one rank that exhausted inputs.",
        RuntimeError,
        "exhausted their inputs",
    ),
]


def native(error: Any, text: Any = None) -> tuple[Any, Any]:
    """Give the error, and its text, by which the native module says what torch says so."""
    from hpcdist import DistError

    if text is None:
        more: dict[Any, tuple[type[Exception], ...]] = {
            RuntimeError: (ValueError, TypeError),  # which wrong arguments are
            AttributeError: (DistError,),  # where an object cannot be pickled: on all ranks
        }
        errors = error if isinstance(error, tuple) else (error,)
        also = sum((more.get(each, ()) for each in errors), ())
        return (errors + also if also else error), None
    for theirs, pattern, own, own_text in _NATIVE:
        found = re.fullmatch(pattern, text) if error is theirs else None
        if found:
            return own, found.expand(own_text)
    return error, ours(text)


def ours(pattern: Any) -> Any:
    """Translate the text an error must have from gloo's words; what is not gloo's stays."""
    if isinstance(pattern, str):
        for theirs, text in _WORDS:
            found = re.fullmatch(theirs, pattern)
            if found:
                return text(found) if callable(text) else found.expand(text)
    return pattern
