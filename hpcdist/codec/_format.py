"""The payload format: header, tags and limits shared by the writer and the reader.

A payload is eight header bytes and one value. The header is ``hpdo``, a version byte, a kind byte
(``T`` typed, ``P`` pickle), the sender's byte order (``<`` or ``>``) and a zero. A value is one tag
byte and its content; lengths and counts are unsigned 64-bit little-endian integers. Raw array data
is in the byte order its dtype names (NumPy) or in the sender's (torch).

Source: written for hpcdist; a closed set of tags with explicit lengths is MessagePack's idea.
"""

from __future__ import annotations

import struct
import sys

from hpcdist.errors import DistError

MAGIC = b"hpdo"
VERSION = 1
KIND_TYPED = b"T"
KIND_PICKLE = b"P"
BYTE_ORDER = b"<" if sys.byteorder == "little" else b">"
HEADER_SIZE = 8

#: How deep containers may nest. The writer and the reader recurse, two Python frames a level, and
#: the interpreter allows 1,000 frames by default.
MAX_DEPTH = 128
#: torch allows 64 dimensions at most, NumPy 64 since 2.0.
MAX_NDIM = 64

U64 = struct.Struct("<Q")
I64 = struct.Struct("<q")
F64 = struct.Struct("<d")
C128 = struct.Struct("<dd")

NONE, TRUE, FALSE = b"N", b"1", b"0"
INT, BIGINT, FLOAT, COMPLEX = b"i", b"I", b"f", b"c"
STR, BYTES, BYTEARRAY = b"s", b"b", b"B"
LIST, TUPLE, DICT, ORDERED_DICT, SET, FROZENSET = b"l", b"t", b"d", b"o", b"e", b"E"
PACKED = b"p"
WITH_ATTRIBUTES = b"O"  # an OrderedDict, then a dict of its attributes
SLICE, RANGE, TIMEDELTA = b":", b"r", b"m"
NP_DTYPE, NP_ARRAY, NP_SCALAR = b"y", b"a", b"n"
TORCH_DTYPE, TORCH_DEVICE, TORCH_SIZE, TENSOR = b"D", b"V", b"Z", b"T"
REGISTERED, STDLIB, ENUM = b"R", b"L", b"M"
REF = b"&"

#: Items a list or tuple needs before it is worth checking whether it is all int or all float.
PACK_FROM = 8

#: Steps of the way to an object that a message shows.
_MOST_STEPS = 12


class CodecError(DistError, ValueError):
    """A payload cannot be turned back into an object.

    It is damaged, of another version or byte order, names a type that is not registered here, or
    is a pickle in a process that did not choose to allow pickle. Nothing in it was executed.
    """


class Refused(Exception):
    """The writer met something that it does not encode; carries the way to it from the root.

    Parameters
    ----------
    error : type
        ``TypeError`` or ``ValueError``: what the caller will see.
    reason : str
        What is wrong with the object, without its place.
    """

    def __init__(self, error: type[Exception], reason: str) -> None:
        super().__init__(reason)
        self.error = error
        self.reason = reason
        self.steps: list[str] = []

    def inside(self, step: str) -> None:
        """Add one step of the way, innermost first: ``"[3]"``, ``".lr"`` or ``" (a key)"``."""
        self.steps.append(step)

    def place(self) -> str:
        """The whole way from the root, as Python would write it: ``obj['a'][3]``."""
        steps = self.steps[::-1]
        if len(steps) > _MOST_STEPS:
            middle = f" ({len(steps) - _MOST_STEPS} levels deeper) "
            steps[_MOST_STEPS // 2 : -_MOST_STEPS // 2] = [middle]
        return "obj" + "".join(steps)
