"""Python objects to bytes and back without executing anything.

The object collectives send what :func:`encode` makes and hand out what :func:`decode` returns.
The codec carries a closed set of types:

- None, bool, int of any size, float, complex, str, bytes, bytearray;
- list, tuple, dict, set, frozenset, slice, range; of collections OrderedDict with its attributes,
  Counter, deque, and defaultdict with a built-in type as its factory;
- of datetime: date, time, datetime, timedelta, timezone; Decimal, Fraction, UUID, the paths of
  pathlib, ``argparse.Namespace``, ``types.SimpleNamespace``;
- members of enums whose module the receiver has imported;
- NumPy arrays, scalars and dtypes without Python objects in them;
- torch CPU tensors of every dtype, ``nn.Parameter``, and torch's dtype, device and Size;
- classes given to :func:`register_object_type`.

Types are matched exactly: a subclass is another type. An object that appears twice in one payload
arrives as one object again; an object that contains itself is refused. Tensors and arrays arrive
with memory of their own, without gaps; tensors that share a storage no longer do. Tensors keep the
order of their dimensions in memory (``channels_last``), NumPy arrays C or Fortran order.

Anything else is a ``TypeError`` that says where it sits (``obj['a'][3]``). Pickle is used only by
explicit choice (:class:`allow_pickle`, ``pickle=True``), and a pickle that arrives in a process
that did not make this choice is an error.
"""

from __future__ import annotations

import pickle as _pickle
from typing import Any

from hpcdist.codec import _format as f
from hpcdist.codec._choice import HOW_TO_ALLOW, allow_pickle, pickle_allowed
from hpcdist.codec._format import MAX_DEPTH, CodecError, Refused
from hpcdist.codec._reader import call_user, read_payload
from hpcdist.codec._registry import register_object_type
from hpcdist.codec._writer import write_payload

__all__ = ["MAX_DEPTH", "CodecError", "allow_pickle", "decode", "encode", "register_object_type"]


def encode(obj: Any, *, pickle: bool | None = None) -> bytearray:
    """Return the payload of an object.

    Parameters
    ----------
    obj : object
        Anything the codec carries; with pickle allowed, anything at all.
    pickle : bool, optional
        Whether an object that the codec does not carry may be pickled as a whole. ``None``: as
        :class:`allow_pickle` and ``HPCDIST_ALLOW_PICKLE`` say (default: no).

    Returns
    -------
    bytearray
        The payload, at most a few bytes longer than the raw data of arrays in it.

    Raises
    ------
    TypeError
        Part of `obj` is of a type that the codec does not carry, and pickle is not allowed; or a
        registered encode function raised, whose exception is the cause.
    ValueError
        `obj` contains itself, or nests deeper than ``MAX_DEPTH`` levels.

    Notes
    -----
    Not collective. Time is linear in the size of the payload.
    """
    try:
        return write_payload(obj)
    except Refused as refused:
        cause = refused.__cause__
        if cause is None and pickle_allowed(pickle):  # what a registered function refuses, stays so
            head = f.MAGIC + bytes((f.VERSION,)) + f.KIND_PICKLE + f.BYTE_ORDER + b"\0"
            return bytearray(head + _pickle.dumps(obj, protocol=5))
        raise refused.error(f"cannot send {refused.place()}: {refused.reason}") from cause


def decode(payload: Any, *, pickle: bool | None = None) -> Any:
    """Return the object of a payload that :func:`encode` made, here or in another process.

    Parameters
    ----------
    payload : bytes-like
        One whole payload.
    pickle : bool, optional
        Whether a payload that is a pickle may be loaded, which can execute any code. ``None``: as
        :class:`allow_pickle` and ``HPCDIST_ALLOW_PICKLE`` say (default: no).

    Returns
    -------
    object
        It shares no memory with `payload`.

    Raises
    ------
    CodecError
        The payload is damaged, of another version or byte order, holds a type that is not
        registered here, or is a pickle that is not allowed. Nothing was executed.

    Notes
    -----
    Not collective. Bytes of any content end in an object or a CodecError, with memory in
    proportion to their number. Time is linear too, except that keys of a dict can be chosen to
    collide, as with every Python dict.
    """
    view = memoryview(payload).cast("B")
    if len(view) < f.HEADER_SIZE or view[:4] != f.MAGIC:
        raise CodecError("damaged object payload: it does not begin like one of hpcdist")
    version, kind, order, zero = view[4], bytes(view[5:6]), bytes(view[6:7]), view[7]
    if version != f.VERSION:
        raise CodecError(
            f"the object payload is of format {version}, this hpcdist reads format {f.VERSION}: "
            "run the same hpcdist on every rank"
        )
    if order != f.BYTE_ORDER or zero:
        raise CodecError("the object payload comes from a machine of another byte order")
    if kind == f.KIND_TYPED:
        return read_payload(view)
    if kind != f.KIND_PICKLE:
        raise CodecError(f"damaged object payload: its kind {kind!r} is unknown")
    if not pickle_allowed(pickle):
        raise CodecError(
            "the object payload is a pickle; it was not loaded and nothing in it ran. "
            + HOW_TO_ALLOW
        )
    return call_user(_pickle.loads, view[f.HEADER_SIZE :])
