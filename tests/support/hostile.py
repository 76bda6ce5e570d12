"""Payloads that no honest rank sends, by kind: each must be refused by whoever decodes it."""

from __future__ import annotations

import os
import pickle
import struct

from hpcdist.codec import encode


def u64(n: int) -> bytes:
    return struct.pack("<Q", n)


def head() -> bytes:
    """The header of an honest payload."""
    return bytes(encode(None)[:8])


def _int(n: int) -> bytes:
    return b"i" + struct.pack("<q", n)


def _text(text: str) -> bytes:
    return b"s" + u64(len(text)) + text.encode()


def _tuple(*items: bytes) -> bytes:
    return b"t" + u64(len(items)) + b"".join(items)


def _path(*texts: str) -> bytes:
    """Module, class and name of a member of an enum."""
    return b"".join(_text(text)[1:] for text in texts)


#: Bodies behind an honest header.
BODIES = {
    "list of 2^62": b"l" + u64(2**62),
    "packed list of 2^61": b"pl" + b"q" + u64(2**61),
    "dict of 2^63": b"d" + u64(2**63) + b"N" * 50,
    "text of 2^40 bytes": b"s" + u64(2**40),
    "integer of 2^50 bytes": b"I" + u64(2**50),
    "bytes of 2^63": b"b" + u64(2**63),
    "bytearray of 2^64-1": b"B" + u64(2**64 - 1),
    "set of 2^60": b"e" + u64(2**60),
    "tuple of 2^32": b"t" + u64(2**32) + b"N" * 100,
    "NumPy text beyond Unicode": b"ns" + u64(3) + b"<U1C\0" + u64(4) + b"s\0y\0",
    "list that holds itself": b"l" + u64(1) + b"&" + u64(0),
    "reference forward": b"l" + u64(2) + b"&" + u64(1) + b"N",
    "reference to nothing": b"&" + u64(2**63),
    "tags without content": b"l" * 5000,
    "nesting 5,000 deep": (b"l" + u64(1)) * 5000,
    "dicts nested in keys": (b"d" + u64(1)) * 2000,
    "set with equal items": b"e" + u64(2) + b"NN",
    "dict with equal keys": b"d" + u64(2) + b"NNNN",
    "unhashable item": b"e" + u64(1) + b"l" + u64(0),
    "unhashable key": b"d" + u64(1) + b"l" + u64(0) + b"N",
    "range of step 0": b"r" + b"i" + u64(0) + b"i" + u64(1) + b"i" + u64(0),
    "range of texts": b"r" + 3 * (b"s" + u64(1) + b"x"),
    "attributes of a list": b"Ol" + u64(0) + b"d" + u64(0),
    "attributes in a list": b"Oo" + u64(0) + b"l" + u64(0),
    "attributes without names": b"Oo" + u64(0) + b"d" + u64(1) + b"NN",
    "timedelta too long": b"m" + 3 * (b"i" + struct.pack("<q", 2**62)),
    "text that is no UTF-8": b"s" + u64(2) + b"\xff\xfe",
    "unknown tag": b"\xfe",
    "array of 2^64 elements": b"as" + u64(3) + b"<f8" + b"C\x02" + u64(2**32) * 2 + u64(0),
    "array of 2^61 elements": b"as" + u64(3) + b"<f8" + b"C\x01" + u64(2**61) + u64(0),
    "array of 255 dimensions": b"as" + u64(3) + b"<f8" + b"C\xff" + u64(1) * 255 + u64(8) + u64(0),
    "array of objects": b"as" + u64(2) + b"|O" + b"C\x01" + u64(1) + u64(8) + u64(0),
    "array of nothing, 2^60 times": b"as" + u64(3) + b"|V0" + b"C\x01" + u64(2**60) + u64(0),
    "dtype of a gigabyte": b"as" + u64(11) + b"|V999999999" + b"C\x01" + u64(0) + u64(0),
    "array shorter than it says": b"as" + u64(3) + b"<f8" + b"C\x01" + u64(4) + u64(32) + b"x" * 8,
    "code in a dtype": b"ys" + u64(16) + b"os.system('id')x",
    "dtype that nests": b"yt" + u64(2) + b"s" + u64(3) + b"<f8" + b"i" + u64(2**40),
    "torch function for a dtype": b"D" + u64(4) + b"load",
    "torch's dictionary for a dtype": b"D" + u64(8) + b"__dict__",
    "unknown device": b"V" + u64(4) + b"evil" + b"i" + struct.pack("<q", -1),
    "device 10^10": b"V" + u64(4) + b"cuda" + b"i" + u64(10**10),
    "size of 2^60 dimensions": b"Z" + u64(2**60),
    "quantized tensor": b"T\x00" + u64(5) + b"qint8" + b"\x01" + u64(1) + u64(1) + b"x",
    "tensor of 2^124 elements": (
        b"T\x00" + u64(7) + b"float32" + b"\x03" + u64(2**62) * 2 + u64(0) + u64(0)
    ),
    "tensor of -1 elements": b"T\x00" + u64(7) + b"float32" + b"\x01" + u64(2**64 - 1) + u64(0),
    **{
        f"tensor of strides {strides}": (
            b"T\x04" + u64(7) + b"float32" + b"\x02" + u64(2) + u64(extent)
            + b"".join(map(u64, strides)) + u64(8 * extent) + bytes(8 * extent)
        )
        for strides, extent in (
            ((0, 1), 2), ((1, 1), 2), ((1, 3), 2), ((4, 1), 2), ((2, 2**63), 1), ((1, 2**64 - 1), 2)
        )
    },
    "tensor flags": b"T\xff" + u64(7) + b"float32" + b"\x00" + u64(4) + u64(0),
    "integers that require grad": b"T\x01" + u64(5) + b"int32" + b"\x00" + u64(4) + b"abcd",
    "function for a registered type": b"R" + u64(9) + b"os.system" + b"s" + u64(2) + b"id",
    "builtin for a registered type": b"R" + u64(13) + b"builtins.eval" + b"s" + u64(1) + b"1",
    "kind that is none of the standard library": b"LxN",
    "date that is none": b"LY" + _tuple(_int(2026), _int(13), _int(1)),
    "date of texts": b"LY" + _tuple(_text("a"), _int(1), _int(1)),
    "date of four numbers": b"LY" + _tuple(*[_int(1)] * 4),
    "time in a zone of text": b"LH" + _tuple(*[_int(1)] * 4, _text("utc"), _int(0)),
    "time zone of a week": b"LZ" + _tuple(b"m" + _int(7) + _int(0) + _int(0), b"N"),
    "Decimal of nonsense": b"Le" + _text("os.system"),
    "Decimal of a number": b"Le" + _int(1),
    "Fraction over 0": b"Lf" + _tuple(_int(1), _int(0)),
    "Fraction of a megabyte": b"Lf" + _tuple(b"I" + u64(1 << 20) + b"\x07" * (1 << 20), _int(6)),
    "UUID of 3 bytes": b"Lu" + b"b" + u64(3) + b"abc",
    "path of a number": b"LP" + _int(1),
    "defaultdict of eval": b"Ld" + _tuple(_text("eval"), b"d" + u64(0)),
    "defaultdict of a list": b"Ld" + _tuple(b"N", b"l" + u64(0)),
    "Counter of a list": b"Lc" + b"l" + u64(0),
    "deque of -1 items": b"Lq" + _tuple(_int(-1), b"l" + u64(0)),
    "deque that is too long": b"Lq" + _tuple(_int(0), b"l" + u64(1) + b"N"),
    "Namespace without names": b"Ln" + b"d" + u64(1) + _int(1) + b"N",
    "SimpleNamespace without names": b"Ls" + b"d" + u64(1) + _int(1) + b"N",
    "Namespace as a key": b"e" + u64(1) + b"Ln" + b"d" + u64(0),
    "kinds without content": b"Lc" * 3000,
    "enum of no module": b"M" + _path("no.module", "E", "A"),
    "function for an enum": b"M" + _path("os", "system", "A"),
    "class for an enum": b"M" + _path("collections", "OrderedDict", "A"),
    "method for a member": b"M" + _path("http", "HTTPStatus", "mro"),
    "module in a module": b"M" + _path("os", "path.join", "A"),
    "enum with an empty name": b"M" + _path("", "", ""),
    "type with an empty name": b"R" + u64(0) + b"N",
    "something after the end": b"NN",
}  # fmt: skip


class Runs:
    """Runs a function where it is unpickled."""

    def __init__(self, function, *arguments) -> None:
        self.how = (function, arguments)

    def __reduce__(self):
        return self.how


def payloads(path: str) -> dict[str, bytes]:
    """Every kind. What executes creates the file `path`."""
    honest = bytes(encode({"weights": list(range(40)), "name": "x" * 50}))
    h = head()
    found = {name: h + body for name, body in BODIES.items()}
    found |= {
        "empty": b"",
        "one byte": b"h",
        "half a header": h[:4],
        "a header alone": h,
        "wrong magic": b"evil" + honest[4:],
        "future version": h[:4] + b"\x63" + honest[5:],
        "unknown kind": h[:5] + b"X" + honest[6:],
        "unknown byte order": h[:6] + b"?" + honest[7:],
        "reserved byte": h[:7] + b"\x01" + honest[8:],
        "cut in the middle": honest[: len(honest) // 2],
        "cut by one byte": honest[:-1],
        "one byte too many": honest + b"\0",
        "zeros": bytes(4096),
        "noise": os.urandom(4096),
        "a zip of torch.save": b"PK\x03\x04" + bytes(300),
    }
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        evil = pickle.dumps(Runs(open, path, "w"), protocol)
        found[f"pickle of protocol {protocol}"] = evil
        found[f"pickle of protocol {protocol} behind a header"] = h[:5] + b"P" + h[6:] + evil
    found["pickle of os.system"] = (
        h[:5] + b"P" + h[6:] + pickle.dumps(Runs(os.system, f"touch {path}"))
    )
    found["pickle of eval"] = (
        h[:5] + b"P" + h[6:] + pickle.dumps(Runs(eval, f"open({path!r}, 'w')"))
    )
    found["pickle in a typed payload"] = h + b"b" + pickle.dumps(Runs(open, path, "w"))
    return found
