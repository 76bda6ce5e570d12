"""NumPy and torch parts of the codec: dtypes as plain data, arrays as raw bytes.

torch is imported only when a payload or an object needs it.
"""

from __future__ import annotations

import functools
import math
import re
import sys
from typing import Any

import numpy as np

from hpcdist.codec._format import MAX_NDIM, CodecError, Refused

# Kinds whose bytes are their whole value. Object arrays ("O") hold pointers, and a string dtype
# like numpy.dtypes.StringDType ("T") keeps its text elsewhere.
_DTYPE_TEXT = re.compile(r"[<>|=][?biufcSUV]\d{1,9}|[<>][mM]8(\[\d{0,9}[A-Za-z]{1,7}\])?")

# A zero-length array of a dtype still allocates one item of it.
_MAX_ITEM_OF_EMPTY = 1 << 16

#: Flags of a tensor; ``STRIDED``: its strides follow its shape.
_REQUIRES_GRAD, _PARAMETER, STRIDED = 1, 2, 4


def torch_if_loaded() -> Any:
    """Return torch if this process has imported it: without that no object can be torch's."""
    return sys.modules.get("torch")


# --- NumPy -------------------------------------------------------------------------------------


def plain_from_dtype(dtype: np.dtype[Any]) -> Any:
    """Describe a NumPy dtype by str and tuples; raises :class:`Refused` for what cannot travel.

    A simple dtype is its ``dtype.str``, a sub-array ``(base, shape)``, a structured dtype
    ``(names, fields, offsets, itemsize, aligned)``. Metadata and titles do not travel.
    """
    if dtype.hasobject:
        raise Refused(
            TypeError,
            f"its dtype is {dtype}, which holds Python objects; send x.tolist(), "
            "or convert it to a numeric or fixed-width dtype",
        )
    if dtype.itemsize == 0:
        raise Refused(TypeError, f"its dtype {dtype} has items of zero bytes")
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return (plain_from_dtype(base), shape)
    if dtype.names is not None and dtype.fields is not None:
        fields = [dtype.fields[name] for name in dtype.names]
        return (
            dtype.names,
            tuple(plain_from_dtype(field[0]) for field in fields),
            tuple(int(field[1]) for field in fields),
            dtype.itemsize,
            dtype.isalignedstruct,
        )
    text = dtype.str
    if not _DTYPE_TEXT.fullmatch(text) or np.dtype(text) != dtype:
        raise Refused(
            TypeError, f"its dtype is {dtype}, which hpcdist's object codec does not carry"
        )
    return text


def dtype_from_plain(plain: Any) -> np.dtype[Any]:
    """Make the dtype that :func:`plain_from_dtype` described, from data that may be hostile."""
    dtype: np.dtype[Any]
    if type(plain) is str:
        if not _DTYPE_TEXT.fullmatch(plain):
            raise CodecError(f"{plain[:40]!r} is no dtype that the codec carries")
        dtype = np.dtype(plain)
    elif type(plain) is tuple and len(plain) == 2:
        dtype = np.dtype((dtype_from_plain(plain[0]), plain[1]))
    elif type(plain) is tuple and len(plain) == 5:
        names, fields, offsets, itemsize, aligned = plain
        dtype = np.dtype(
            {
                "names": list(names),
                "formats": [dtype_from_plain(field) for field in fields],
                "offsets": list(offsets),
                "itemsize": itemsize,
            },
            align=aligned is True,
        )
    else:
        raise CodecError("a dtype is described by something else than str and tuples")
    if dtype.hasobject or dtype.itemsize == 0:
        raise CodecError(f"the codec does not carry the dtype {dtype}")
    return dtype


def split_array(array: np.ndarray[Any, Any]) -> tuple[Any, bytes, tuple[int, ...], memoryview]:
    """Return an array's dtype description, order (``b"C"`` or ``b"F"``), shape and raw bytes."""
    plain = plain_from_dtype(array.dtype)
    order = b"C"
    flat = array
    if not array.flags.c_contiguous:
        if array.flags.f_contiguous:
            order, flat = b"F", array.T
        else:
            flat = np.ascontiguousarray(array)
    return plain, order, array.shape, flat.reshape(-1).view(np.uint8).data


def join_array(
    dtype: np.dtype[Any], order: bytes, shape: tuple[int, ...], raw: memoryview
) -> np.ndarray[Any, Any]:
    """Make a writable array of its own from raw bytes."""
    _check_size("array", math.prod(shape), dtype.itemsize, raw.nbytes)
    if raw.nbytes == 0 and dtype.itemsize > _MAX_ITEM_OF_EMPTY:
        raise CodecError(f"an empty array of items of {dtype.itemsize} bytes")
    if order not in (b"C", b"F"):
        raise CodecError(f"the array order {order!r} is neither C nor F")
    view: np.ndarray[Any, Any] = np.ndarray(
        shape, dtype, buffer=raw, order="C" if order == b"C" else "F"
    )
    return view.copy(order="K")


# --- torch -------------------------------------------------------------------------------------


@functools.cache
def _torch_dtypes() -> dict[str, Any]:
    import torch

    found = (getattr(torch, name) for name in dir(torch))
    return {str(dtype)[6:]: dtype for dtype in found if isinstance(dtype, torch.dtype)}


def torch_dtype_name(dtype: Any) -> str:
    """Return a torch dtype's name without the ``torch.`` in front."""
    return str(dtype)[6:]


def torch_dtype(name: str) -> Any:
    """Return the torch dtype of a name; raises :class:`CodecError` when this torch has none."""
    dtype = _torch_dtypes().get(name)
    if dtype is None:
        raise CodecError(f"the torch of this process has no dtype {name[:40]!r}")
    return dtype


def split_tensor(
    tensor: Any,
) -> tuple[str, int, tuple[int, ...], tuple[int, ...], memoryview]:
    """Return a CPU tensor's dtype name, flags, shape, strides and raw bytes in memory's order.

    A tensor with gaps or overlaps is made dense first, in its dimensions' order if it has one. The
    strides are empty where they are those of a contiguous tensor.
    """
    import torch

    from hpcdist._buffer import unreadable

    if tensor.layout is not torch.strided:
        raise Refused(TypeError, f"it is a {tensor.layout} tensor; send x.to_dense()")
    if tensor.device.type != "cpu":
        raise Refused(TypeError, f"it is a tensor on {tensor.device}; send x.cpu()")
    if tensor.is_quantized:
        raise Refused(TypeError, "it is a quantized tensor; send x.dequantize() or x.int_repr()")
    why = unreadable(tensor)
    if why is not None:
        raise Refused(TypeError, f"it {why}")
    flags = _REQUIRES_GRAD if tensor.requires_grad else 0
    if type(tensor) is torch.nn.Parameter:
        flags |= _PARAMETER
    data = tensor.detach().resolve_conj().resolve_neg()
    shape, strides = tuple(data.shape), data.stride()
    if not _is_dense(shape, strides):
        data = torch.empty_like(data, memory_format=torch.preserve_format).copy_(data)
        strides = data.stride()
    if strides == _contiguous_strides(shape):
        strides = ()
    else:
        flags |= STRIDED
    raw = memoryview(b"")
    if data.numel():  # empty tensors may have strides that forbid the view
        raw = _flat(data).data
    return torch_dtype_name(tensor.dtype), flags, shape, strides, raw


def join_tensor(
    name: str, flags: int, shape: tuple[int, ...], strides: tuple[int, ...], raw: memoryview
) -> Any:
    """Make a CPU tensor that owns its memory from raw bytes."""
    import torch

    dtype = torch_dtype(name)
    if name.startswith(("qint", "quint")) or flags > (_REQUIRES_GRAD | _PARAMETER | STRIDED):
        raise CodecError(f"a tensor of {name} with flags {flags}")
    _check_size("tensor", math.prod(shape), dtype.itemsize, raw.nbytes)
    if not flags & STRIDED:
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
    elif _is_dense(shape, strides):
        tensor = torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
    else:
        raise CodecError("a tensor's strides leave gaps or overlap")
    if raw.nbytes:
        _flat(tensor)[:] = np.frombuffer(raw, np.uint8)
    if flags & _PARAMETER:
        return torch.nn.Parameter(tensor, requires_grad=bool(flags & _REQUIRES_GRAD))
    return tensor.requires_grad_() if flags & _REQUIRES_GRAD else tensor


def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the elements fill a block of memory, in whatever order of dimensions."""
    items = 1
    # of an extent of one the stride may be anything, and of an empty tensor all
    for stride, extent in sorted(zip(strides, shape, strict=True)):
        if stride != items and extent != 1 and 0 not in shape:
            return False
        items *= extent
    return True


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def _flat(tensor: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the bytes of a dense tensor that is not empty, in memory's order."""
    import torch

    # As bytes: NumPy has them for every dtype, bfloat16 and float8 included.
    flat: np.ndarray[Any, np.dtype[np.uint8]]
    flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
    return flat


def torch_device(kind: str, index: int) -> Any:
    """Return the torch device of a type and an index (-1: none)."""
    import torch

    device = torch.device(kind) if index < 0 else torch.device(kind, index)
    # torch keeps the index in eight bits and drops the others without a word.
    if device.type != kind or device.index != (None if index < 0 else index):
        raise CodecError(f"there is no torch device {kind[:20]}:{index}")
    return device


def torch_size(numbers: tuple[int, ...]) -> Any:
    """Return a ``torch.Size``."""
    import torch

    return torch.Size(numbers)


def _check_size(what: str, items: int, itemsize: int, nbytes: int) -> None:
    if items * itemsize != nbytes:
        raise CodecError(f"a {what} of {items} items of {itemsize} bytes came with {nbytes} bytes")


def check_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Refuse shapes that no array library takes, before one is asked."""
    if len(shape) > MAX_NDIM or any(n >= 1 << 63 for n in shape):
        raise CodecError("an array's shape or strides are out of range")
    return shape
