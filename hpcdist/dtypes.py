"""Element types: hpcdist's codes beside the types of torch and NumPy, and what reduces them.

The codes and the table of operations are those of the native modules (``kernels/hd_types.h``); a
test compares the two. This module is a leaf: it imports nothing of hpcdist, and torch and NumPy
only when one of their types is asked for.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy
    import torch

_BITWISE = ("BAND", "BOR", "BXOR")
_OPS_BY_KIND = {
    "bool": ("SUM", "PRODUCT", "MIN", "MAX", *_BITWISE),
    "uint": ("SUM", "AVG", "PRODUCT", "MIN", "MAX", *_BITWISE),
    "int": ("SUM", "AVG", "PRODUCT", "MIN", "MAX", *_BITWISE),
    "float": ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "PREMUL_SUM"),
    "complex": ("SUM", "AVG", "PREMUL_SUM"),
    "float8": (),
}


@dataclass(frozen=True)
class DType:
    """One element type.

    Parameters
    ----------
    name : str
        Its name in torch, such as ``"bfloat16"``; NumPy's is the same where NumPy has the type.
    code : int
        Its number in the native modules.
    itemsize : int
        Bytes of one element.
    kind : {"bool", "uint", "int", "float", "complex", "float8"}
        The family; operations are promised by family.
    """

    name: str
    code: int
    itemsize: int
    kind: str

    @property
    def ops(self) -> tuple[str, ...]:
        """Names of the reduce operations that take this type; none for float8, which only moves."""
        return _OPS_BY_KIND[self.kind]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype.

        Raises
        ------
        TypeError
            If the installed torch is too old to have it.
        """
        import torch

        found = getattr(torch, self.name, None)
        if not isinstance(found, torch.dtype):
            raise TypeError(f"torch {torch.__version__} has no dtype {self.name}")
        return found

    @property
    def numpy_dtype(self) -> numpy.dtype[Any]:
        """The NumPy dtype, in this machine's byte order.

        Raises
        ------
        TypeError
            For bfloat16 and float8 unless a package that adds them to NumPy (``ml_dtypes``) has
            been imported.
        """
        import numpy

        try:
            return numpy.dtype(self.name)
        except TypeError:
            pass
        added = getattr(sys.modules.get("ml_dtypes"), self.name, None)
        if added is None:
            raise TypeError(
                f"NumPy has no dtype {self.name}; use a torch tensor, or import ml_dtypes first"
            )
        return numpy.dtype(added)

    def __str__(self) -> str:
        return self.name


DTYPES: tuple[DType, ...] = tuple(
    DType(name, code, itemsize, kind)
    for code, (name, itemsize, kind) in enumerate(
        [
            ("bool", 1, "bool"),
            ("uint8", 1, "uint"),
            ("int8", 1, "int"),
            ("uint16", 2, "uint"),
            ("int16", 2, "int"),
            ("uint32", 4, "uint"),
            ("int32", 4, "int"),
            ("uint64", 8, "uint"),
            ("int64", 8, "int"),
            ("float16", 2, "float"),
            ("bfloat16", 2, "float"),
            ("float32", 4, "float"),
            ("float64", 8, "float"),
            ("complex64", 8, "complex"),
            ("complex128", 16, "complex"),
            ("float8_e4m3fn", 1, "float8"),
            ("float8_e5m2", 1, "float8"),
            ("float8_e4m3fnuz", 1, "float8"),
            ("float8_e5m2fnuz", 1, "float8"),
            ("float8_e8m0fnu", 1, "float8"),
        ]
    )
)

_BY_NAME = {dtype.name: dtype for dtype in DTYPES}


def lookup(dtype: object) -> DType:
    """The element type that something names.

    Parameters
    ----------
    dtype : DType, int, str, torch.dtype, numpy.dtype or NumPy scalar type
        A code, a name such as ``"float32"``, or another library's type.

    Raises
    ------
    TypeError
        If hpcdist has no such element type; the message lists those it has. Also for a NumPy type
        in foreign byte order, whose values no kernel could read.
    """
    if isinstance(dtype, DType):
        return dtype
    if isinstance(dtype, int) and not isinstance(dtype, bool) and 0 <= dtype < len(DTYPES):
        return DTYPES[dtype]
    if isinstance(dtype, str):
        found = _BY_NAME.get(dtype)
    else:
        found = _from_torch(dtype) or _from_numpy(dtype)
    if found is None:
        raise TypeError(f"{dtype!r} is no element type of hpcdist; it has {', '.join(_BY_NAME)}")
    return found


def reducible_by(op: str) -> tuple[DType, ...]:
    """The element types a reduce operation takes.

    Parameters
    ----------
    op : str
        A member's name of ``ReduceOp``, such as ``"PREMUL_SUM"``.

    Returns
    -------
    tuple of DType
        In the order of their codes.

    Raises
    ------
    ValueError
        If there is no such operation.
    """
    found = tuple(dtype for dtype in DTYPES if op in dtype.ops)
    if not found:
        raise ValueError(f"{op!r} is no reduce operation")
    return found


@cache
def _torch_names() -> dict[torch.dtype, str]:
    import torch

    found = ((getattr(torch, name, None), name) for name in _BY_NAME)
    return {dtype: name for dtype, name in found if isinstance(dtype, torch.dtype)}


def _from_torch(dtype: object) -> DType | None:
    # A torch.dtype exists only where torch has been imported: asking must not import it.
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(dtype, torch.dtype):
        return None
    name = _torch_names().get(dtype)
    return _BY_NAME[name] if name else None


def _from_numpy(dtype: object) -> DType | None:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(dtype, type) and issubclass(dtype, numpy.generic):
        dtype = numpy.dtype(dtype)
    if not isinstance(dtype, numpy.dtype):
        return None
    if not dtype.isnative:
        raise TypeError(
            f"{dtype!r} is not in this machine's byte order; convert with "
            "array.astype(array.dtype.newbyteorder('='))"
        )
    # By name: it also knows the types that ml_dtypes adds, without importing it.
    return _BY_NAME.get(dtype.name)
