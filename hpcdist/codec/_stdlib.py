"""Types of the standard library that travel as plain values, and members of enums.

Each kind turns an object into values that the codec carries, and makes it again from them. That
calls only constructors of the standard library, with arguments that are checked first: nothing is
imported, and no code of the program runs.
"""

from __future__ import annotations

import argparse
import datetime
import decimal
import enum
import fractions
import pathlib
import sys
import types
import uuid
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

from hpcdist.codec._format import CodecError, Refused

#: Bits of a Fraction's numerator and denominator together: making one takes their square.
MOST_BITS = 1 << 16

#: What a defaultdict may call for a missing key.
_FACTORIES: dict[str, Any] = {
    each.__name__: each
    for each in (bool, bytes, complex, Counter, deque, dict, float, int, list, set, str, tuple)
}  # fmt: skip


class Kind(NamedTuple):
    """A type, its code in payloads, and the functions between its objects and plain values."""

    code: bytes
    cls: type
    plain: Callable[[Any], Any]
    make: Callable[[Any], Any]


def _need(value: Any, *kinds: Any) -> Any:
    """Return a value whose exact type is one of these, or raise CodecError."""
    if type(value) not in kinds:
        raise CodecError(f"a {type(value).__name__} stands where another type belongs")
    return value


def _several(value: Any, *kinds: Any) -> Any:
    """Return a tuple with one value per argument, each of this type or of one of these."""
    if len(_need(value, tuple)) != len(kinds):
        raise CodecError(f"{len(value)} values stand where {len(kinds)} belong")
    for each, kind in zip(value, kinds, strict=True):
        _need(each, *(kind if isinstance(kind, tuple) else (kind,)))
    return value


def _named(made: Any, state: Any) -> Any:
    for name in _need(state, dict):
        _need(name, str)
    vars(made).update(state)
    return made


def _from_defaultdict(obj: Any) -> Any:
    factory = obj.default_factory
    name = getattr(factory, "__name__", "")
    if factory is not None and _FACTORIES.get(name) is not factory:
        raise Refused(
            TypeError,
            f"it is a defaultdict whose default_factory is {factory!r}; hpcdist's object codec "
            f"carries None and {', '.join(_FACTORIES)}. Send dict(x)",
        )
    return name if factory is not None else None, dict(obj)


def _to_defaultdict(state: Any) -> Any:
    name, content = _several(state, (str, type(None)), dict)
    if name is not None and name not in _FACTORIES:
        raise CodecError(f"a defaultdict of {name[:50]!r}")
    return defaultdict(None if name is None else _FACTORIES[name], content)


def _to_counter(state: Any) -> Any:
    made: Counter[Any] = Counter()
    dict.update(made, _need(state, dict))
    return made


def _to_deque(state: Any) -> Any:
    longest, items = _several(state, (int, type(None)), list)
    if longest is not None and longest < len(items):
        raise CodecError(f"a deque of {len(items)} items, at most {longest}")
    return deque(items, longest)


_TZ = (datetime.timezone, type(None))


def _clock(obj: Any) -> tuple[Any, ...]:
    """Return what a time and a datetime have in common."""
    if obj.tzinfo is not None and type(obj.tzinfo) is not datetime.timezone:
        raise Refused(
            TypeError,
            f"its tzinfo is of type {type(obj.tzinfo).__name__}; hpcdist's object codec carries "
            "datetime.timezone. Send x.astimezone(datetime.timezone.utc)",
        )
    return obj.hour, obj.minute, obj.second, obj.microsecond, obj.tzinfo, obj.fold


def _to_time(state: Any) -> datetime.time:
    *clock, fold = _several(state, int, int, int, int, _TZ, int)
    return datetime.time(*clock, fold=fold)


def _to_datetime(state: Any) -> datetime.datetime:
    *clock, fold = _several(state, int, int, int, int, int, int, int, _TZ, int)
    return datetime.datetime(*clock, fold=fold)


def _to_timezone(state: Any) -> datetime.timezone:
    offset, name = _several(state, datetime.timedelta, (str, type(None)))
    if name is not None:
        return datetime.timezone(offset, name)
    return datetime.timezone(offset) if offset else datetime.timezone.utc


def _from_timezone(obj: Any) -> tuple[Any, ...]:
    arguments = obj.__getinitargs__()
    return arguments if len(arguments) == 2 else (*arguments, None)


def _from_fraction(obj: Any) -> tuple[int, int]:
    pair = obj.numerator, obj.denominator
    if sum(part.bit_length() for part in pair) > MOST_BITS:
        raise Refused(ValueError, f"it is a Fraction of more than {MOST_BITS} bits")
    return pair


def _to_fraction(state: Any) -> fractions.Fraction:
    pair = _several(state, int, int)
    if sum(part.bit_length() for part in pair) > MOST_BITS:
        raise CodecError(f"a Fraction of more than {MOST_BITS} bits")
    return fractions.Fraction(*pair)


def _path(cls: Any) -> tuple[type, Callable[[Any], Any], Callable[[Any], Any]]:
    return cls, str, lambda state: cls(_need(state, str))


_KINDS = [
    Kind(b"n", argparse.Namespace, lambda obj: dict(vars(obj)),
         lambda state: _named(argparse.Namespace(), state)),
    Kind(b"s", types.SimpleNamespace, lambda obj: dict(vars(obj)),
         lambda state: _named(types.SimpleNamespace(), state)),
    Kind(b"d", defaultdict, _from_defaultdict, _to_defaultdict),
    Kind(b"c", Counter, dict, _to_counter),
    Kind(b"q", deque, lambda obj: (obj.maxlen, list(obj)), _to_deque),
    Kind(b"Y", datetime.date, lambda obj: (obj.year, obj.month, obj.day),
         lambda state: datetime.date(*_several(state, int, int, int))),
    Kind(b"H", datetime.time, _clock, _to_time),
    Kind(b"D", datetime.datetime, lambda obj: (obj.year, obj.month, obj.day, *_clock(obj)),
         _to_datetime),
    Kind(b"Z", datetime.timezone, _from_timezone, _to_timezone),
    Kind(b"e", decimal.Decimal, str, lambda state: decimal.Decimal(_need(state, str))),
    Kind(b"f", fractions.Fraction, _from_fraction, _to_fraction),
    Kind(b"u", uuid.UUID, lambda obj: obj.bytes,
         lambda state: uuid.UUID(bytes=_need(state, bytes))),
    Kind(b"P", *_path(type(pathlib.Path()))),
    Kind(b"p", *_path(pathlib.PurePosixPath)),
    Kind(b"w", *_path(pathlib.PureWindowsPath)),
]  # fmt: skip

by_type = {kind.cls: kind for kind in _KINDS}
by_code = {kind.code: kind for kind in _KINDS}


# --- members of enums ----------------------------------------------------------------------------


def _found(module: str, qualname: str) -> Any:
    """Return the class of a name in a module that has been imported, or None.

    Only dictionaries are read: attributes of modules and classes can run code.
    """
    place: Any = sys.modules.get(module)
    if not isinstance(place, types.ModuleType):
        return None
    content = types.ModuleType.__getattribute__(place, "__dict__")
    for name in qualname.split("."):
        place = content.get(name)
        if not issubclass(type(place), type):
            return None
        content = type.__getattribute__(place, "__dict__")
    return place


def _members(cls: Any) -> Any:
    """Return the members of an enum by name; None for anything else."""
    if not issubclass(type(cls), enum.EnumMeta):
        return None
    return type.__getattribute__(cls, "_member_map_")


def enum_path(member: enum.Enum) -> tuple[str, str, str]:
    """Return module, class and name of a member, which another process can find it by."""
    cls = type(member)
    found = cls.__module__, cls.__qualname__, getattr(member, "_name_", None)
    if _found(*found[:2]) is not cls:
        raise Refused(
            TypeError,
            f"it is a member of {'.'.join(found[:2])}, which is not found under that name. Call "
            f"hpcdist.register_object_type({cls.__name__}) on every rank",
        )
    if not isinstance(found[2], str) or _members(cls).get(found[2]) is not member:
        raise Refused(
            TypeError,
            f"it is a combination of members of {'.'.join(found[:2])}. Call "
            f"hpcdist.register_object_type({cls.__name__}) on every rank, or send its value",
        )
    return found  # type: ignore[return-value]


def enum_member(module: str, qualname: str, name: str) -> Any:
    """Return a member of an enum that this process has imported, or None."""
    members = _members(_found(module, qualname))
    return members.get(name) if members is not None else None
