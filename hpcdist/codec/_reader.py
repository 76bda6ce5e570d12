"""Payload to object, for payloads that may be damaged or hostile.

Every length is checked against the bytes that are left before anything of that length is made, so
the object costs at most a constant times its payload. Names are looked up in closed tables, never
imported or evaluated.
"""

from __future__ import annotations

import datetime
import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from hpcdist.codec import _arrays, _registry, _stdlib
from hpcdist.codec import _format as f
from hpcdist.codec._format import CodecError

_UNFINISHED = object()

#: Keys from which on their hashes are counted, and how many of them may have the same.
_FEW = 1000
_ALIKE = 100


class _Unknown(CodecError):
    """The payload is sound, but contains what this process cannot make."""


#: What bad bytes can lead to. A signal handler raises anything else, which is no damage.
ORDINARY = (
    ArithmeticError, AssertionError, AttributeError, BufferError, EOFError, LookupError,
    MemoryError, RuntimeError, SyntaxError, SystemError, TypeError, ValueError, struct.error,
)  # fmt: skip


def read_payload(view: memoryview) -> Any:
    """Return the object of a typed payload whose header was checked; raises CodecError."""
    reader = _Reader(view, f.HEADER_SIZE)
    try:
        obj = reader.value(0)
    except _Unknown as exc:
        raise CodecError(str(exc)) from exc.__cause__
    except CodecError as exc:
        raise CodecError(f"damaged object payload near byte {reader.at}: {exc}") from exc.__cause__
    except ORDINARY as exc:
        # NumPy, torch and datetime refuse impossible values in their own words.
        raise CodecError(
            f"damaged object payload near byte {reader.at}: {type(exc).__name__}: {exc}"
        ) from exc
    if reader.at != len(view):
        raise CodecError(
            f"damaged object payload: {len(view) - reader.at} bytes follow the object's end"
        )
    return obj


class _Reader:
    """One pass over one payload; `at` is the next byte."""

    def __init__(self, view: memoryview, at: int) -> None:
        self.view = view
        self.at = at
        # Numbered objects in the order in which they began, as the writer counts them.
        self.seen: list[Any] = []
        self.in_key = 0

    # --- pieces ---

    def take(self, n: int) -> memoryview:
        end = self.at + n
        if end > len(self.view):
            raise CodecError(f"it ends {end - len(self.view)} bytes too early")
        piece = self.view[self.at : end]
        self.at = end
        return piece

    def tag(self) -> bytes:
        return bytes(self.take(1))

    def u64(self) -> int:
        number: int = f.U64.unpack(self.take(8))[0]
        return number

    def count(self, least: int = 1) -> int:
        """Read a number of things that take at least `least` bytes each."""
        n = self.u64()
        left = len(self.view) - self.at
        if n * least > left:
            raise CodecError(f"{n} items of {least} bytes or more cannot be in {left} bytes")
        return n

    def text(self) -> str:
        return str(self.take(self.u64()), "utf-8", "surrogatepass")

    def integer(self) -> int:
        tag = self.tag()
        if tag == f.INT:
            return _int(self)
        if tag == f.BIGINT:
            return _bigint(self)
        raise CodecError(f"the tag {tag!r} stands where an int belongs")

    def shape(self) -> tuple[int, ...]:
        return self.extents(self.take(1)[0])

    def extents(self, ndim: int) -> tuple[int, ...]:
        return _arrays.check_shape(tuple(self.u64() for _ in range(ndim)))

    # --- values ---

    def value(self, depth: int) -> Any:
        tag = self.tag()
        scalar = _SCALARS.get(tag)
        if scalar is not None:
            return scalar(self)
        if tag == f.REF:
            return self.reference()
        compound = _COMPOUND.get(tag)
        if compound is None:
            raise CodecError(f"the tag {tag!r} is unknown")
        if depth >= f.MAX_DEPTH:
            raise CodecError(f"it is nested more than {f.MAX_DEPTH} levels deep")
        if self.in_key:
            return compound(self, depth + 1)
        number = len(self.seen)
        self.seen.append(_UNFINISHED)
        obj = self.seen[number] = compound(self, depth + 1)
        return obj

    def key(self, depth: int) -> Any:
        self.in_key += 1
        try:
            return self.value(depth)
        finally:
            self.in_key -= 1

    def reference(self) -> Any:
        number = self.u64()
        if self.in_key or number >= len(self.seen) or self.seen[number] is _UNFINISHED:
            raise CodecError(f"the reference to object {number} leads nowhere")
        return self.seen[number]


# --- values without content of their own -----------------------------------------------------


def _int(reader: _Reader) -> int:
    number: int = f.I64.unpack(reader.take(8))[0]
    return number


def _bigint(reader: _Reader) -> int:
    return int.from_bytes(reader.take(reader.u64()), "little", signed=True)


def _float(reader: _Reader) -> float:
    number: float = f.F64.unpack(reader.take(8))[0]
    return number


def _complex(reader: _Reader) -> complex:
    return complex(*f.C128.unpack(reader.take(16)))


def _bytes(reader: _Reader) -> bytes:
    return bytes(reader.take(reader.u64()))


# --- containers -------------------------------------------------------------------------------


def _bytearray(reader: _Reader, depth: int) -> bytearray:
    return bytearray(reader.take(reader.u64()))


def _list(reader: _Reader, depth: int) -> list[Any]:
    return [reader.value(depth) for _ in range(reader.count())]


def _tuple(reader: _Reader, depth: int) -> tuple[Any, ...]:
    return tuple(_list(reader, depth))


def _packed(reader: _Reader, depth: int) -> Any:
    container, kind = reader.tag(), reader.tag()
    if container not in (f.LIST, f.TUPLE) or kind not in (b"q", b"d"):
        raise CodecError(f"packed items of {container!r} and {kind!r}")
    n = reader.count(8)
    values = struct.unpack(f"<{n}{kind.decode()}", reader.take(8 * n))
    return values if container == f.TUPLE else list(values)


def _counts_hashes(n: int) -> Callable[[Any], None]:
    """Look out for keys of one hash: n of them take n^2 steps, an hour for some megabytes.

    Numbers are hashed without a secret, so a payload can be made of such keys.
    """
    found: dict[int, int] = {}

    def count(key: Any) -> None:
        number = hash(key)
        found[number] = times = found.get(number, 0) + 1
        if times > _ALIKE:
            raise CodecError(f"more than {_ALIKE} of {n} keys have the same hash")

    return count


def _fill(reader: _Reader, depth: int, target: dict[Any, Any]) -> dict[Any, Any]:
    n = reader.count(2)
    count = _counts_hashes(n) if n > _FEW else None
    for _ in range(n):
        key = reader.key(depth)
        if count is not None:
            count(key)
        target[key] = reader.value(depth)
    if len(target) != n:
        raise CodecError("a dict has the same key twice")
    return target


def _dict(reader: _Reader, depth: int) -> dict[Any, Any]:
    return _fill(reader, depth, {})


def _ordered_dict(reader: _Reader, depth: int) -> dict[Any, Any]:
    return _fill(reader, depth, OrderedDict())


def _with_attributes(reader: _Reader, depth: int) -> dict[Any, Any]:
    if (tag := reader.tag()) != f.ORDERED_DICT:
        raise CodecError(f"the tag {tag!r} stands where an OrderedDict belongs")
    made = _ordered_dict(reader, depth)
    attributes = reader.value(depth)
    if type(attributes) is not dict or not all(type(name) is str for name in attributes):
        raise CodecError("the attributes of an OrderedDict have no names")
    vars(made).update(attributes)
    return made


def _set(reader: _Reader, depth: int) -> set[Any]:
    n = reader.count()
    count = _counts_hashes(n) if n > _FEW else None
    elements: set[Any] = set()
    for _ in range(n):
        key = reader.key(depth)
        if count is not None:
            count(key)
        elements.add(key)
    if len(elements) != n:
        raise CodecError("a set has the same element twice")
    return elements


def _frozenset(reader: _Reader, depth: int) -> frozenset[Any]:
    return frozenset(_set(reader, depth))


def _slice(reader: _Reader, depth: int) -> slice:
    return slice(reader.value(depth), reader.value(depth), reader.value(depth))


def _range(reader: _Reader, depth: int) -> range:
    return range(reader.integer(), reader.integer(), reader.integer())


def _timedelta(reader: _Reader, depth: int) -> datetime.timedelta:
    return datetime.timedelta(reader.integer(), reader.integer(), reader.integer())


def _registered(reader: _Reader, depth: int) -> Any:
    name = reader.text()
    entry = _registry.by_name(name)
    if entry is None:
        raise _Unknown(
            f"the payload holds an object of type {name[:200]}, which is not registered in this "
            "process: call hpcdist.register_object_type for it on every rank"
        )
    state = reader.value(depth)
    try:
        return call_user(entry.decode, state)
    except Exception as exc:
        raise _Unknown(
            f"the decode function of {name} failed: {type(exc).__name__}: {exc}"
        ) from exc


def call_user(decode: Callable[[Any], Any], state: Any) -> Any:
    """Call what runs a user's code: what is raised in this frame may be that code's."""
    return decode(state)


def _of_stdlib(reader: _Reader, depth: int) -> Any:
    code = reader.tag()
    kind = _stdlib.by_code.get(code)
    if kind is None:
        raise CodecError(f"the kind {code!r} of the standard library is unknown")
    return kind.make(reader.value(depth))


def _enum(reader: _Reader, depth: int) -> Any:
    module, qualname, name = reader.text(), reader.text(), reader.text()
    member = _stdlib.enum_member(module, qualname, name)
    if member is None:
        raise _Unknown(
            f"the payload holds {module[:100]}.{qualname[:100]}.{name[:100]}, and no enum that "
            "this process has imported has that member: import its module on every rank, or call "
            "hpcdist.register_object_type for the class"
        )
    return member


def _np_dtype(reader: _Reader, depth: int) -> Any:
    return _arrays.dtype_from_plain(reader.key(depth))


def _np_array(reader: _Reader, depth: int) -> Any:
    dtype = _np_dtype(reader, depth)
    order, shape = reader.tag(), reader.shape()
    return _arrays.join_array(dtype, order, shape, reader.take(reader.u64()))


def _np_scalar(reader: _Reader, depth: int) -> Any:
    array = _np_array(reader, depth)
    if array.ndim:
        raise CodecError("a NumPy scalar with dimensions")
    return array[()]


def _tensor(reader: _Reader, depth: int) -> Any:
    flags = reader.take(1)[0]
    name, shape = reader.text(), reader.shape()
    strides = reader.extents(len(shape)) if flags & _arrays.STRIDED else ()
    return _arrays.join_tensor(name, flags, shape, strides, reader.take(reader.u64()))


def _torch_dtype(reader: _Reader, depth: int) -> Any:
    return _arrays.torch_dtype(reader.text())


def _torch_device(reader: _Reader, depth: int) -> Any:
    return _arrays.torch_device(reader.text(), reader.integer())


def _torch_size(reader: _Reader, depth: int) -> Any:
    return _arrays.torch_size(tuple(_int(reader) for _ in range(reader.count(8))))


_SCALARS: dict[bytes, Callable[[_Reader], Any]] = {
    f.NONE: lambda reader: None,
    f.TRUE: lambda reader: True,
    f.FALSE: lambda reader: False,
    f.INT: _int,
    f.BIGINT: _bigint,
    f.FLOAT: _float,
    f.COMPLEX: _complex,
    f.STR: _Reader.text,
    f.BYTES: _bytes,
}
_COMPOUND: dict[bytes, Callable[[_Reader, int], Any]] = {
    f.BYTEARRAY: _bytearray,
    f.LIST: _list,
    f.TUPLE: _tuple,
    f.PACKED: _packed,
    f.DICT: _dict,
    f.ORDERED_DICT: _ordered_dict,
    f.WITH_ATTRIBUTES: _with_attributes,
    f.SET: _set,
    f.FROZENSET: _frozenset,
    f.SLICE: _slice,
    f.RANGE: _range,
    f.TIMEDELTA: _timedelta,
    f.NP_DTYPE: _np_dtype,
    f.NP_ARRAY: _np_array,
    f.NP_SCALAR: _np_scalar,
    f.TORCH_DTYPE: _torch_dtype,
    f.TORCH_DEVICE: _torch_device,
    f.TORCH_SIZE: _torch_size,
    f.TENSOR: _tensor,
    f.REGISTERED: _registered,
    f.STDLIB: _of_stdlib,
    f.ENUM: _enum,
}
