"""User types that the codec may carry, by name."""

from __future__ import annotations

import dataclasses
import datetime
import enum
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np

T = TypeVar("T", bound=type)


class Entry(NamedTuple):
    """How one registered type is written and read."""

    cls: type
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


_by_type: dict[type, Entry] = {}
_by_name: dict[str, Entry] = {}

# The codec writes these itself; registering one would silently do nothing.
_BUILT_IN = (
    type(None), bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset,
    slice, range, datetime.timedelta, np.ndarray, np.generic,
)  # fmt: skip


def type_name(cls: type) -> str:
    """Return the name a type goes by in payloads and messages: ``module.Qualified.name``."""
    return f"{cls.__module__}.{cls.__qualname__}"


def register_object_type(
    cls: T,
    encode: Callable[[Any], Any] | None = None,
    decode: Callable[[Any], Any] | None = None,
) -> T:
    """Let instances of a class travel in object collectives.

    Instances are matched by their exact class (not subclasses) and named in the payload by
    ``module.qualname``. Register the same classes on every rank, before the first object that
    contains one is sent; a rank that meets a name it does not know raises :class:`CodecError`.

    Parameters
    ----------
    cls : type
        The class. Dataclasses, enums, named tuples and classes with plain attributes need nothing
        more: a dataclass travels as its fields (``__init__`` and ``__post_init__`` are not called
        on arrival, as with pickle), an enum member as its name, a named tuple as its values, any
        other object as its ``__dict__``.
    encode : callable, optional
        ``encode(instance)`` returns anything that the codec can carry. Needed with `decode` for a
        class with ``__slots__``, with its own ``__new__`` or with methods of pickle's.
    decode : callable, optional
        ``decode(value)`` makes the instance again. It runs on data that another rank sent: check
        what it is given.

    Returns
    -------
    type
        `cls` itself, so that the function serves as a decorator.

    Raises
    ------
    TypeError
        `cls` is no class, or needs `encode` and `decode` and was given none or one.
    ValueError
        `cls` is one of the types that the codec carries anyway.

    Examples
    --------
    >>> @hpcdist.register_object_type
    ... @dataclasses.dataclass
    ... class Metrics:
    ...     loss: float
    ...     seen: int

    Notes
    -----
    Not collective. Registering a class again, or another class of the same name (a notebook cell
    run twice), replaces the earlier entry. Source: hpcdist; torch pickles instead.
    """
    if not isinstance(cls, type):
        raise TypeError(f"register_object_type takes a class, not {cls!r}")
    if cls in _BUILT_IN or issubclass(cls, np.generic):
        raise ValueError(f"hpcdist carries {type_name(cls)} without registration")
    if (encode is None) != (decode is None):
        raise TypeError("give both encode and decode, or neither")
    if encode is None or decode is None:
        entry = _default_entry(cls)
    else:
        entry = Entry(cls, encode, decode)
    _by_type[cls] = entry
    _by_name[type_name(cls)] = entry
    return cls


def by_type(cls: type) -> Entry | None:
    """Return the entry of a class, or None."""
    return _by_type.get(cls)


def by_name(name: str) -> Entry | None:
    """Return the entry of a class named in a payload, or None."""
    return _by_name.get(name)


def is_namedtuple_type(cls: type) -> bool:
    """Return whether a class was made by ``collections.namedtuple`` or ``typing.NamedTuple``."""
    return issubclass(cls, tuple) and hasattr(cls, "_fields") and hasattr(cls, "_make")


def registers_by_itself(cls: type) -> bool:
    """Return whether ``register_object_type(cls)`` needs no functions."""
    return (
        dataclasses.is_dataclass(cls)
        or issubclass(cls, enum.Enum)
        or is_namedtuple_type(cls)
        or _has_plain_attributes(cls)
    )


def _has_plain_attributes(cls: Any) -> bool:
    """Return whether an instance's ``__dict__`` is all there is to it."""
    ours = [base for base in cls.__mro__ if base is not object]
    own = {name for base in ours for name in vars(base)}
    return (
        cls.__new__ is object.__new__
        and cls.__dictoffset__ != 0
        and not issubclass(cls, BaseException)
        and not own
        & {
            "__slots__",
            "__reduce__",
            "__reduce_ex__",
            "__getstate__",
            "__setstate__",
            "__getnewargs__",
            "__getnewargs_ex__",
        }  # fmt: skip
    )


def _default_entry(cls: type) -> Entry:
    if dataclasses.is_dataclass(cls):
        return _dataclass_entry(cls)
    if issubclass(cls, enum.Enum):
        return _enum_entry(cls)
    if is_namedtuple_type(cls):
        return _namedtuple_entry(cls)
    if _has_plain_attributes(cls):
        return _plain_entry(cls)
    raise TypeError(
        f"{type_name(cls)} is no dataclass, enum, named tuple or class of plain attributes: "
        "register_object_type(cls, encode, decode) needs both functions"
    )


def _plain_entry(cls: Any) -> Entry:
    def encode(instance: Any) -> dict[str, Any]:
        return dict(vars(instance))

    def decode(state: Any) -> Any:
        if type(state) is not dict or not all(type(name) is str for name in state):
            raise ValueError(f"an object of {type_name(cls)} travels as a dict of its attributes")
        instance = object.__new__(cls)
        vars(instance).update(state)
        return instance

    return Entry(cls, encode, decode)


def _dataclass_entry(cls: Any) -> Entry:
    names = [field.name for field in dataclasses.fields(cls)]

    def encode(instance: Any) -> dict[str, Any]:
        return {name: getattr(instance, name) for name in names}

    def decode(state: Any) -> Any:
        if type(state) is not dict or list(state) != names:
            raise ValueError(f"the fields of {type_name(cls)} are {names} here, not as sent")
        instance = object.__new__(cls)
        for name, value in state.items():
            # Frozen dataclasses refuse setattr; slots and plain attributes accept this one.
            object.__setattr__(instance, name, value)
        return instance

    return Entry(cls, encode, decode)


def _enum_entry(cls: Any) -> Entry:
    def decode(name: Any) -> Any:
        if type(name) is not str and type(name) is not int:
            raise ValueError(f"a member of {type_name(cls)} travels as its name")
        return cls[name] if type(name) is str else cls(name)

    def encode(member: Any) -> Any:
        # A combination of flags may have no name of its own; its number then stands for it.
        return member.name if member.name in cls.__members__ else member.value

    return Entry(cls, encode, decode)


def _namedtuple_entry(cls: Any) -> Entry:
    def decode(values: Any) -> Any:
        if type(values) is not tuple or len(values) != len(cls._fields):
            raise ValueError(f"{type_name(cls)} has {len(cls._fields)} fields here, not as sent")
        return cls._make(values)

    return Entry(cls, tuple, decode)
