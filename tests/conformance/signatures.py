"""What a callable accepts: from Python, or from the first lines of a docstring of pybind11."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_NO_DEFAULT = "no default"
_OVERLOAD = re.compile(r"^(?:\d+\. )?\w+\((.*)\)(?: -> .*)?$", re.MULTILINE)
_PYBIND_NAME = re.compile(r"arg\d+$")


@dataclass(frozen=True)
class Parameter:
    """A parameter: its name if it can be a keyword, its place if it can be positional."""

    name: str
    keyword: bool
    place: int | None
    default: str


@dataclass(frozen=True)
class Signature:
    """The parameters of a callable; `any` accepts whatever it is not known to refuse."""

    parameters: tuple[Parameter, ...]
    any_keyword: bool
    any_place: bool


def _shown(value: Any) -> str:
    """Show a default so that the same value reads the same in torch and in hpcdist."""
    return _NO_DEFAULT if value is inspect.Parameter.empty else _read(repr(value))


def _read(text: str) -> str:
    """Put a default that is written differently in torch and in hpcdist in one form."""
    text = re.sub(r"<(?:RedOpType|ReduceOp)\.(\w+).*>", r"ReduceOp.\1", text)
    if re.fullmatch(r"<[\w.]+Options object at \w+>", text):
        return "None"  # torch's default options are those of None
    found = re.fullmatch(r"<(?:function|class|built-in function) '?([\w.]+)'?.*>", text)
    return found[1].rpartition(".")[2] if found else text


def _python(given: inspect.Signature) -> Signature:
    parameters = []
    place = 0
    any_keyword = any_place = False
    for one in given.parameters.values():
        any_keyword |= one.kind is one.VAR_KEYWORD
        any_place |= one.kind is one.VAR_POSITIONAL
        if one.kind in (one.VAR_KEYWORD, one.VAR_POSITIONAL):
            continue
        positional = one.kind is not one.KEYWORD_ONLY
        keyword = one.kind is not one.POSITIONAL_ONLY
        where = place if positional else None
        place += positional
        parameters.append(Parameter(one.name, keyword, where, _shown(one.default)))
    return Signature(tuple(parameters), any_keyword, any_place)


def _split(text: str) -> list[str]:
    """Split at the commas outside brackets and quotes."""
    parts, depth, quoted = [""], 0, ""
    for letter in text:
        if letter in "'\"" and quoted in ("", letter):
            quoted = "" if quoted else letter
        depth += (letter in "([{<") - (letter in ")]}>") if not quoted else 0
        if letter == "," and not depth and not quoted:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def _pybind(docstring: str) -> list[Signature]:
    """Read the signatures, one per overload, from what pybind11 has written."""
    found = []
    for text in _OVERLOAD.findall(docstring.partition("\n\n\n")[0]):
        if "*args, **kwargs" in text:
            continue
        parameters = []
        place = 0
        only = False
        for part in _split(text):
            if part in ("*", "/"):
                only = only or part == "*"
                continue
            head, _, default = part.partition(" = ")
            name = head.partition(":")[0].strip()
            parameters.append(
                Parameter(
                    name,
                    _PYBIND_NAME.match(name) is None and name != "self",
                    None if only else place,
                    _read(default) if default else _NO_DEFAULT,
                )
            )
            place += 1
        found.append(Signature(tuple(parameters), False, False))
    return found


def signature(function: Any) -> list[Signature]:
    """Return what a callable accepts, per overload; nothing if it does not tell."""
    target = inspect.unwrap(function) if callable(function) else function
    try:
        return [_python(inspect.signature(target))]
    except (TypeError, ValueError):
        return _pybind(getattr(function, "__doc__", None) or "")


def _one(path: str, theirs: Signature, ours: Signature) -> Iterator[str]:
    by_name = {one.name: one for one in ours.parameters}
    by_place = {one.place: one for one in ours.parameters if one.place is not None}
    for their in theirs.parameters:
        if their.name == "self":
            continue
        if their.keyword:
            our = by_name.get(their.name)
            if our is None:
                if not ours.any_keyword:
                    yield f"{path}({their.name}): missing"
                continue
        else:
            our = by_place.get(their.place)
            if our is None:
                if not ours.any_place:
                    yield f"{path}: takes {their.place} arguments less"
                continue
        if their.place is not None and our.place != their.place and not ours.any_place:
            yield f"{path}({their.name}): another place"
        if their.keyword and not our.keyword:
            yield f"{path}({their.name}): no keyword here"
        if their.default not in (our.default, _NO_DEFAULT):
            if our.default == _NO_DEFAULT:
                yield f"{path}({their.name}): required here"
            else:
                yield f"{path}({their.name}): {their.default} in torch, here {our.default}"
    known = {one.name for one in theirs.parameters}
    for our in ours.parameters:
        fills = {one.place for one in theirs.parameters if not one.keyword}
        if our.name not in known and our.default == _NO_DEFAULT and our.place not in fills:
            if not (theirs.any_keyword or theirs.any_place) and our.name != "self":
                yield f"{path}({our.name}): required here, unknown in torch"


def differing(path: str, theirs: list[Signature], ours: list[Signature]) -> Iterator[str]:
    """Give the rows in which ours accepts less than torch's, for the closest of our overloads."""
    for their in theirs:
        if ours:
            yield from min((list(_one(path, their, our)) for our in ours), key=len)
