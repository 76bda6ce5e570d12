"""Object to payload."""

from __future__ import annotations

import datetime
import enum
import reprlib
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from hpcdist.codec import _arrays, _registry, _stdlib
from hpcdist.codec import _format as f
from hpcdist.codec._choice import HOW_TO_ALLOW
from hpcdist.codec._format import Refused


def write_payload(obj: Any) -> bytearray:
    """Return the typed payload of an object; raises :class:`Refused` when it cannot be written."""
    out = bytearray(f.MAGIC + bytes((f.VERSION,)) + f.KIND_TYPED + f.BYTE_ORDER + b"\0")
    _Writer(out).value(obj, 0)
    return out


class _Writer:
    """One pass over one object, appending to one bytearray.

    Objects that may be shared (containers, arrays, registered types) are numbered in the order in
    which they begin; a second meeting writes the number. Inside dict keys and set elements nothing
    is numbered: hashing what arrives must cost no more than the bytes that arrived.
    """

    def __init__(self, out: bytearray) -> None:
        self.out = out
        # id -> (number, object); the object is kept so that its id cannot be used again.
        self.seen: dict[int, tuple[int, Any]] = {}
        self.open: set[int] = set()
        self.in_key = 0

    def value(self, obj: Any, depth: int) -> None:
        cls = type(obj)
        scalar = _SCALARS.get(cls)
        if scalar is not None:
            scalar(self.out, obj)
            return
        writer = _COMPOUND.get(cls) or self._other(obj)
        key = id(obj)
        if key in self.open:
            raise Refused(ValueError, "it contains itself: hpcdist's object codec has no cycles")
        if depth >= f.MAX_DEPTH:
            raise Refused(ValueError, f"it is nested more than {f.MAX_DEPTH} levels deep")
        if not self.in_key:
            if key in self.seen:
                self.out += f.REF + f.U64.pack(self.seen[key][0])
                return
            self.seen[key] = (len(self.seen), obj)
        self.open.add(key)
        writer(self, obj, depth + 1)
        self.open.discard(key)

    def _other(self, obj: Any) -> Callable[[_Writer, Any, int], None]:
        """Find how to write an object whose exact type is in no table, or refuse it."""
        if _registry.by_type(type(obj)) is not None:
            return _registered
        if type(obj) in _stdlib.by_type:
            return _of_stdlib
        if isinstance(obj, enum.Enum):
            return _enum
        if isinstance(obj, np.generic):
            return _np_scalar
        if isinstance(obj, np.dtype):
            return _np_dtype
        torch = _arrays.torch_if_loaded()
        if torch is not None:
            cls = type(obj)
            if cls is torch.Tensor or cls is torch.nn.Parameter:
                return _tensor
            if cls is torch.Size:
                return _torch_size
            if cls is torch.dtype:
                return _torch_dtype
            if cls is torch.device:
                return _torch_device
        raise Refused(TypeError, _unknown(obj))

    def count(self, tag: bytes, n: int) -> None:
        self.out += tag + f.U64.pack(n)

    def items(self, values: Iterable[Any], depth: int) -> None:
        i = 0
        try:
            for i, item in enumerate(values):  # noqa: B007 - the handler needs the last i
                self.value(item, depth)
        except Refused as refused:
            refused.inside(f"[{i}]")
            raise

    def key(self, obj: Any, depth: int, what: str) -> None:
        self.in_key += 1
        try:
            self.value(obj, depth)
        except Refused as refused:
            refused.inside(what)
            raise
        finally:
            self.in_key -= 1


def _unknown(obj: Any) -> str:
    cls = type(obj)
    name = _registry.type_name(cls)
    text = f"it is of type {name}, which hpcdist's object codec does not carry. "
    if isinstance(obj, np.ndarray):
        if isinstance(obj, np.ma.MaskedArray):
            return text + "Send x.filled(...), or x.data and x.mask."
        return text + "numpy.asarray(x) gives a plain array."
    torch = _arrays.torch_if_loaded()
    if torch is not None and isinstance(obj, torch.Tensor):
        return text + "x.as_subclass(torch.Tensor) gives a plain tensor."
    if _registry.registers_by_itself(cls):
        text += f"Call hpcdist.register_object_type({cls.__name__}) on every rank. "
    else:
        text += (
            "Send plain data (numbers, str, bytes, lists, tuples, dicts, sets, arrays, tensors), "
            f"or call hpcdist.register_object_type({cls.__name__}, encode, decode) on every rank. "
        )
    return text + HOW_TO_ALLOW


# --- values without content of their own -----------------------------------------------------


def _none(out: bytearray, obj: None) -> None:
    out += f.NONE


def _bool(out: bytearray, obj: bool) -> None:
    out += f.TRUE if obj else f.FALSE


def _int(out: bytearray, obj: int) -> None:
    if -(1 << 63) <= obj < 1 << 63:
        out += f.INT + f.I64.pack(obj)
        return
    raw = obj.to_bytes(obj.bit_length() // 8 + 1, "little", signed=True)
    out += f.BIGINT + f.U64.pack(len(raw)) + raw


def _float(out: bytearray, obj: float) -> None:
    out += f.FLOAT + f.F64.pack(obj)


def _complex(out: bytearray, obj: complex) -> None:
    out += f.COMPLEX + f.C128.pack(obj.real, obj.imag)


def _text(out: bytearray, text: str) -> None:
    # surrogatepass: file names that are no UTF-8 are str with lone surrogates.
    raw = text.encode("utf-8", "surrogatepass")
    out += f.U64.pack(len(raw)) + raw


def _str(out: bytearray, obj: str) -> None:
    out += f.STR
    _text(out, obj)


def _bytes(out: bytearray, obj: bytes) -> None:
    out += f.BYTES + f.U64.pack(len(obj))
    out += obj


# --- containers -------------------------------------------------------------------------------


def _bytearray(writer: _Writer, obj: bytearray, depth: int) -> None:
    writer.count(f.BYTEARRAY, len(obj))
    writer.out += obj


def _packed(values: list[Any] | tuple[Any, ...]) -> bytes | None:
    """Return all-int or all-float items as one block, or None: items in a loop cost 30 times it."""
    kinds = set(map(type, values))
    try:
        if kinds == {int}:
            return b"q" + struct.pack(f"<{len(values)}q", *values)
        if kinds == {float}:
            return b"d" + struct.pack(f"<{len(values)}d", *values)
    except struct.error:  # an int beyond 64 bits
        pass
    return None


def _list(writer: _Writer, obj: list[Any] | tuple[Any, ...], depth: int) -> None:
    tag = f.LIST if type(obj) is list else f.TUPLE
    if len(obj) >= f.PACK_FROM:
        block = _packed(obj)
        if block is not None:
            writer.count(f.PACKED + tag + block[:1], len(obj))
            writer.out += memoryview(block)[1:]
            return
    writer.count(tag, len(obj))
    writer.items(obj, depth)


def _ordered_dict(writer: _Writer, obj: OrderedDict[Any, Any], depth: int) -> None:
    attributes = vars(obj)  # of a module's state: the versions of its parts
    if attributes:
        writer.out += f.WITH_ATTRIBUTES
    _dict(writer, obj, depth)
    if attributes:
        try:
            writer.value(dict(attributes), depth)
        except Refused as refused:
            refused.inside(" (its attributes)")
            raise


def _dict(writer: _Writer, obj: dict[Any, Any], depth: int) -> None:
    writer.count(f.DICT if type(obj) is dict else f.ORDERED_DICT, len(obj))
    for key, value in obj.items():
        writer.key(key, depth, " (a key)")
        try:
            writer.value(value, depth)
        except Refused as refused:
            refused.inside(f"[{reprlib.repr(key)}]")
            raise


def _set(writer: _Writer, obj: set[Any] | frozenset[Any], depth: int) -> None:
    writer.count(f.SET if type(obj) is set else f.FROZENSET, len(obj))
    for element in obj:
        writer.key(element, depth, " (an element)")


def _slice(writer: _Writer, obj: slice, depth: int) -> None:
    writer.out += f.SLICE
    for name in ("start", "stop", "step"):
        try:
            writer.value(getattr(obj, name), depth)
        except Refused as refused:
            refused.inside("." + name)
            raise


def _range(writer: _Writer, obj: range, depth: int) -> None:
    writer.out += f.RANGE
    for number in (obj.start, obj.stop, obj.step):
        _int(writer.out, int(number))


def _timedelta(writer: _Writer, obj: datetime.timedelta, depth: int) -> None:
    writer.out += f.TIMEDELTA
    for number in (obj.days, obj.seconds, obj.microseconds):
        _int(writer.out, number)


def _registered(writer: _Writer, obj: Any, depth: int) -> None:
    entry = _registry.by_type(type(obj))
    assert entry is not None  # _other looked
    name = _registry.type_name(entry.cls)
    try:
        state = entry.encode(obj)
    except Exception as exc:
        raise Refused(
            TypeError, f"the encode function of {name} failed: {type(exc).__name__}: {exc}"
        ) from exc
    writer.out += f.REGISTERED
    _text(writer.out, name)
    # The state is a temporary, and its id may be used again: it stays in `seen` to the end.
    try:
        writer.value(state, depth)
    except Refused as refused:
        refused.inside(f" (what {type(obj).__name__} encodes to)")
        raise


def _of_stdlib(writer: _Writer, obj: Any, depth: int) -> None:
    kind = _stdlib.by_type[type(obj)]
    state = kind.plain(obj)
    writer.out += f.STDLIB + kind.code
    writer.value(state, depth)


def _enum(writer: _Writer, obj: enum.Enum, depth: int) -> None:
    path = _stdlib.enum_path(obj)
    writer.out += f.ENUM
    for text in path:
        _text(writer.out, text)


def _np_dtype(writer: _Writer, obj: np.dtype[Any], depth: int) -> None:
    writer.out += f.NP_DTYPE
    writer.key(_arrays.plain_from_dtype(obj), depth, "")


def _np_array(writer: _Writer, obj: np.ndarray[Any, Any], depth: int) -> None:
    _array(writer, f.NP_ARRAY, obj, depth)


def _np_scalar(writer: _Writer, obj: np.generic, depth: int) -> None:
    _array(writer, f.NP_SCALAR, np.asarray(obj), depth)


def _array(writer: _Writer, tag: bytes, obj: np.ndarray[Any, Any], depth: int) -> None:
    plain, order, shape, raw = _arrays.split_array(obj)
    writer.out += tag
    writer.key(plain, depth, "")
    writer.out += order
    _raw(writer, shape, raw)


def _raw(
    writer: _Writer, shape: tuple[int, ...], raw: memoryview, strides: tuple[int, ...] = ()
) -> None:
    writer.out += bytes((len(shape),))
    writer.out += b"".join(map(f.U64.pack, shape + strides))
    writer.out += f.U64.pack(raw.nbytes)
    writer.out += raw


def _tensor(writer: _Writer, obj: Any, depth: int) -> None:
    name, flags, shape, strides, raw = _arrays.split_tensor(obj)
    writer.out += f.TENSOR + bytes((flags,))
    _text(writer.out, name)
    _raw(writer, shape, raw, strides)


def _torch_dtype(writer: _Writer, obj: Any, depth: int) -> None:
    writer.out += f.TORCH_DTYPE
    _text(writer.out, _arrays.torch_dtype_name(obj))


def _torch_device(writer: _Writer, obj: Any, depth: int) -> None:
    writer.out += f.TORCH_DEVICE
    _text(writer.out, obj.type)
    _int(writer.out, -1 if obj.index is None else obj.index)


def _torch_size(writer: _Writer, obj: Any, depth: int) -> None:
    writer.count(f.TORCH_SIZE, len(obj))
    writer.out += b"".join(map(f.I64.pack, obj))


_SCALARS: dict[type, Callable[[bytearray, Any], None]] = {
    type(None): _none, bool: _bool, int: _int, float: _float, complex: _complex,
    str: _str, bytes: _bytes,
}  # fmt: skip
_COMPOUND: dict[type, Callable[[_Writer, Any, int], None]] = {
    bytearray: _bytearray, list: _list, tuple: _list, dict: _dict, OrderedDict: _ordered_dict,
    set: _set, frozenset: _set, slice: _slice, range: _range, datetime.timedelta: _timedelta,
    np.ndarray: _np_array,
}  # fmt: skip
