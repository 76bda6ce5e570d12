"""Objects of every type that the codec carries, and how they are compared."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import http
import os
import pathlib
import random
import re
import struct
import types
import uuid

import numpy as np
import torch

from hpcdist.codec import register_object_type

SEED = int(os.environ.get("HPCDIST_TEST_SEED", random.SystemRandom().randrange(1 << 31)))


@register_object_type
@dataclasses.dataclass
class Point:
    x: float
    y: object = None
    derived: int = dataclasses.field(init=False, default=7)


@register_object_type
@dataclasses.dataclass(frozen=True)
class Frozen:
    name: str
    parts: tuple = ()


@register_object_type
class Colour(enum.Enum):
    RED = 1
    BLUE = "b"


@register_object_type
class Bits(enum.Flag):
    A = 1
    B = 2


@register_object_type
class Pair(collections.namedtuple("Pair", "left right")):
    __slots__ = ()


class Celsius:
    def __init__(self, degrees):
        self.degrees = degrees

    def __eq__(self, other):
        return type(other) is Celsius and self.degrees == other.degrees

    __hash__ = None


register_object_type(Celsius, lambda c: c.degrees, Celsius)


@register_object_type
class Plain:
    """A class of plain attributes."""

    def __init__(self, x):
        raise AssertionError("not called on arrival")

    def __eq__(self, other):
        return vars(self) == vars(other)

    __hash__ = None


def plain(**attributes):
    made = object.__new__(Plain)
    vars(made).update(attributes)
    return made


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2
    TOP = 2


class Outer:
    class Inner(enum.Enum):
        DEEP = "d"


class Unregistered:
    pass


@dataclasses.dataclass
class UnregisteredData:
    x: int = 0


def equal(a, b):
    """Equality that also compares types, dtypes, signs of zero and NaN bits."""
    if isinstance(a, (np.ndarray, np.generic)) and a.dtype.char in "gG":
        # the padding of long doubles is not part of the value
        assert a.dtype == b.dtype and np.array_equal(a, b)
        return
    assert type(a) is type(b), (type(a), type(b))
    if isinstance(a, (np.ndarray, np.generic)):
        equal(a.dtype, b.dtype)
        assert a.shape == b.shape
        for name in a.dtype.names or ():  # not the bytes: padding is not part of the value
            equal(a[name], b[name])
        assert a.dtype.names or a.tobytes() == b.tobytes()
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape and a.requires_grad == b.requires_grad
        assert b.stride() == torch.empty_like(a).stride()
        plain = [t.detach().resolve_conj().contiguous().reshape(-1) for t in (a, b)]
        assert not a.numel() or torch.equal(*(t.view(torch.uint8) for t in plain))
    elif isinstance(a, float):
        assert struct.pack("d", a) == struct.pack("d", b)
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            equal(x, y)
    elif isinstance(a, decimal.Decimal):
        assert str(a) == str(b)
    elif isinstance(a, collections.deque):
        equal((a.maxlen, list(a)), (b.maxlen, list(b)))
    elif isinstance(a, (argparse.Namespace, types.SimpleNamespace)):
        equal(vars(a), vars(b))
    elif isinstance(a, (datetime.datetime, datetime.time)):
        equal((a.isoformat(), a.fold, a.tzinfo), (b.isoformat(), b.fold, b.tzinfo))
    elif isinstance(a, dict):
        assert getattr(a, "default_factory", 0) is getattr(b, "default_factory", 0)
        assert list(a) == list(b)
        if type(a) is collections.OrderedDict:
            equal(vars(a), vars(b))
        for key in a:
            equal(a[key], b[key])
    elif isinstance(a, np.dtype):
        assert a == b and a.isalignedstruct == b.isalignedstruct
        for name in a.names or ():
            equal(a[name], b[name])
    elif isinstance(a, slice):
        equal((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    else:
        assert a == b


def with_attributes(mapping, **attributes):
    vars(mapping).update(attributes)
    return mapping


def plain_objects():
    """One or more of every type that needs neither NumPy nor torch."""
    yield from (None, True, False, 0, -1, 255, 2**63 - 1, -(2**63), 2**63, -(2**63) - 1)
    yield from (10**5000, -(10**5000), 1 << 64, 0.0, -0.0, 1.5, float("inf"), 5e-324)
    yield from (struct.unpack("<d", struct.pack("<Q", 0x7FF8_0000_0000_1234))[0], 1j, complex(-0.0))
    yield from ("", "text", "Grüße 🌍", "\ud800 lone", "\0", b"", b"\0\xff", bytearray(b"ab"))
    yield from ([], [1, "a", None], list(range(100)), [0.5] * 20, [1, 2.0] * 8, [2**70] * 9)
    yield from ((), (1,), tuple(range(30)), tuple([1.5] * 9), [True] * 9, {}, {"a": 1, 2: [3]})
    yield from ({(1, ("x", 2)): {"deep": [{}]}}, collections.OrderedDict(b=1, a=2))
    yield with_attributes(collections.OrderedDict(b=1), of={"b": [1.5]}, more=None)
    yield from (set(), {1, "a", (2, 3)}, frozenset(), frozenset({frozenset({1}), 2}), range(5))
    yield from (slice(None), slice(1, None, -2), range(10, 0, -3), range(2**70, 2**70 + 3))
    yield from (datetime.timedelta(seconds=-1.5), datetime.timedelta.max, datetime.timedelta())
    yield from (Point(1.0, [Point(2.0)]), Frozen("n", (1, 2)), {Frozen("k"): 1}, Colour.BLUE)
    yield from stdlib_objects()
    yield from (plain(), plain(x=1, y=[plain(z=2.5)]))
    yield from (Bits.A | Bits.B, Bits(0), Pair(1, [2]), Celsius(21.5), [Celsius(1), Celsius(2)])


def stdlib_objects():
    """One or more of every type of the standard library."""
    paths = (pathlib.Path("/tmp/x y"), pathlib.Path(), pathlib.PurePosixPath("a/b"))
    yield from (*paths, pathlib.PureWindowsPath("c:/x"), {pathlib.Path("a"): 1})
    yield from (argparse.Namespace(), argparse.Namespace(lr=0.1, sizes=[1, 2], **{"a b": None}))
    yield from (types.SimpleNamespace(), types.SimpleNamespace(lr=0.1, nested=[{}]))
    default = collections.defaultdict(list, {"a": [1], 2: []})
    yield from (default, collections.defaultdict(None, x=default), collections.Counter("abbccc"))
    yield from (collections.Counter({"a": -1, "b": 0.5}), collections.Counter())
    yield from (collections.deque([1, [2]]), collections.deque(maxlen=3), collections.deque([], 0))
    east = datetime.timezone(datetime.timedelta(hours=5, minutes=30), "IST")
    now = datetime.datetime(2026, 11, 22, 23, 59, 59, 999999, fold=1)
    yield from (now, now.replace(tzinfo=datetime.timezone.utc), now.replace(tzinfo=east))
    yield from (now.date(), now.time(), now.replace(tzinfo=east).timetz(), east)
    yield from (datetime.timezone.utc, datetime.timezone(datetime.timedelta(-0.5)))
    yield from (datetime.datetime.min, datetime.datetime.max, {datetime.date(1, 1, 1)})
    for text in ("0", "-0", "1.50", "1E+999999", "-Infinity", "NaN123", "sNaN", "1e-40"):
        yield decimal.Decimal(text)
    yield from (fractions.Fraction(-1, 3), fractions.Fraction(2**300, 3**100), fractions.Fraction())
    yield from (uuid.UUID(int=0), {uuid.UUID(int=2**128 - 1): decimal.Decimal("0.1")})
    yield from (Level.LOW, Level.TOP, [Level.HIGH, {Level.LOW}], Outer.Inner.DEEP)
    yield from (http.HTTPStatus.OK, re.RegexFlag.MULTILINE)


def numpy_objects():
    """Arrays, scalars and dtypes of every kind that travels, in several layouts."""
    rng = np.random.default_rng(SEED)
    raw = rng.integers(0, 256, 16 * 12, dtype=np.uint8)
    for text in "?bBhHiIlLefdgFDG":
        size = np.dtype(text).itemsize
        if text in "?gG":  # not every bit pattern is a value of these
            array = rng.integers(0, 2, 12).astype(text)
        else:
            array = raw[: 12 * size].view(text)
        yield from (array, array.reshape(3, 4), array.reshape(3, 4).T, array[:0], array[5])
        yield from (array[::2], array[0:1].reshape(()), np.dtype(text))
        if text not in "?bB":
            yield array.view(array.dtype.newbyteorder(">"))
    yield from (np.array(["a", "äö"]), np.array([b"x", b"yz"]), np.str_("s"), np.bytes_(b"b"))
    yield from (np.array(["2020-01-01", "NaT"], "M8[D]"), np.timedelta64(5, "ns"))
    yield from (np.array([1, 2], "m8[25s]"), np.zeros(2, "V3"), np.empty((0, 2**40)))
    record = np.dtype([("a", "<i4"), ("b", ">f8", (2, 2)), ("c", [("d", "U3")])])
    array = np.zeros(3, record)
    array["a"], array["c"]["d"] = [1, 2, 3], "xyz"
    yield from (array, array[1], record)
    aligned = np.dtype([("a", "u1"), ("b", "<i8")], align=True)
    yield from (aligned, np.ones(2, aligned), np.ones(1, aligned)[0], np.dtype((aligned, (2,))))
    yield from (np.dtype([("x", aligned), ("y", "u1")]), np.dtype([("x", record)], align=True))
    many = np.dtype([(f"f{i}", "i1") for i in range(40)])
    yield from (np.ones(2, many), np.arange(24).reshape(2, 3, 4)[:, ::-1], np.asfortranarray(raw))


def torch_objects():
    """Tensors of every dtype this torch has, in several layouts, and torch's small types."""
    generator = torch.Generator().manual_seed(SEED)
    raw = torch.randint(0, 256, (12 * 16,), dtype=torch.uint8, generator=generator)
    dtypes = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
    for dtype in dtypes:
        yield dtype
        if not str(dtype).startswith(("torch.qint", "torch.quint")):
            bits = raw % 2 if dtype == torch.bool else raw
            tensor = bits[: 12 * dtype.itemsize].view(dtype)
            yield from (tensor, tensor.reshape(3, 4), tensor[:0], tensor[0])
    yield from (torch.arange(12).reshape(3, 4).T, torch.ones(6)[::2], torch.ones(1).expand(4))
    yield torch.arange(24).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)
    yield from (torch.ones(2, 2, requires_grad=True), torch.nn.Parameter(torch.ones(3)))
    yield torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16), requires_grad=False)
    yield torch.from_numpy(np.empty((0, 2), np.int16))
    yield from (torch.tensor([1 + 2j]).conj(), torch.zeros(0, 3), torch.Size([2, 0]), torch.Size())
    yield from (torch.device("cpu"), torch.device("cuda", 3), torch.nn.Linear(3, 2).state_dict())


def everything():
    return [*plain_objects(), *numpy_objects(), *torch_objects()]
