"""The object codec: what goes in comes out, refusals say why, pickle is a choice."""

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import os
import pickle
import re
import struct
import subprocess
import sys
import tracemalloc
import types
import zoneinfo

import numpy as np
import pytest
import torch
from codec_cases import (
    Celsius,
    Colour,
    Level,
    Point,
    Unregistered,
    UnregisteredData,
    equal,
    numpy_objects,
    plain_objects,
    torch_objects,
    with_attributes,
)

from hpcdist import codec
from hpcdist.codec import CodecError, decode, encode, register_object_type
from hpcdist.elastic.disk import _with, _without
from hpcdist.parallel.host import on_cpu

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]


class Slotted:
    """A class that needs functions to be registered."""

    __slots__ = ("x",)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("source", [plain_objects, numpy_objects, torch_objects])
def test_round_trip(source):
    for obj in source():
        equal(obj, decode(encode(obj)))
        equal([obj, {"k": obj}], decode(bytes(encode([obj, {"k": obj}]))))
    objects = list(source())
    equal(objects, decode(memoryview(encode(objects))))


def test_results_are_independent_of_the_payload():
    payload = encode([np.arange(4), torch.arange(4), bytearray(b"abcd"), b"abcd"])
    array, tensor, mutable, fixed = decode(payload)
    payload[:] = bytes(len(payload))
    assert array.tolist() == tensor.tolist() == [0, 1, 2, 3] and mutable == fixed == b"abcd"
    array[0] = tensor[0] = 9  # both writable
    frozen = np.arange(3)
    frozen.flags.writeable = False
    decode(encode(frozen))[0] = 1


def test_fields_without_init_and_post_init():
    point = Point(1.0)
    point.derived = 11
    assert decode(encode(point)).derived == 11


def test_shared_objects_stay_shared():
    inner, array, tensor = [1], np.arange(3), torch.ones(2)
    a = decode(encode([inner, inner, {"i": inner}, array, array, tensor, {"t": tensor}]))
    assert a[0] is a[1] is a[2]["i"] and a[3] is a[4] and a[5] is a[6]["t"]
    equal_not_same = decode(encode([[1], [1]]))
    assert equal_not_same[0] is not equal_not_same[1]
    # temporaries made by encode functions must not be mistaken for one another
    values = decode(encode([Celsius([i]) for i in range(50)]))
    assert [c.degrees for c in values] == [[i] for i in range(50)]


def test_a_modules_state_keeps_its_versions():
    """Without them load_state_dict takes it for one of an older version."""
    state = torch.nn.Sequential(torch.nn.BatchNorm1d(2)).state_dict()
    assert state._metadata["0"] == {"version": 2}
    for there in (decode(encode(state)), decode(encode([state, state]))[1], on_cpu(state)):
        equal(there, state)
    tensors = {}
    there = _with(decode(encode(_without([state], "", tensors))), tensors)
    assert len(tensors) == len(state)
    equal(there, [state])


def test_sharing_does_not_blow_up():
    obj = [1]
    for _ in range(100):
        obj = (obj, obj)
    assert len(encode(obj)) < 10_000
    decoded = decode(encode(obj))
    assert decoded[0] is decoded[1]


def refusal(obj, error=TypeError, **kwargs):
    with pytest.raises(error) as caught:
        encode(obj, **kwargs)
    return str(caught.value)


def test_refusals_say_what_where_and_how():
    text = refusal({"a": [0, 1, 2, Unregistered()]})
    for part in ("obj['a'][3]", "Unregistered", "register_object_type", "pickle=True"):
        assert part in text
    assert "HPCDIST_ALLOW_PICKLE" in text
    assert "obj['cfg'].lr" not in text
    for obj, parts in [
        (Unregistered(), ["obj: it is of type", "register_object_type(Unregistered) on every"]),
        (Slotted(), ["obj: it is of type", "encode, decode"]),
        (collections.defaultdict(lambda: 0), ["default_factory", "dict(x)"]),
        (datetime.datetime.now(zoneinfo.ZoneInfo("UTC")), ["ZoneInfo", "astimezone"]),
        (re.I | re.M, ["a combination of members", "RegexFlag", "its value"]),
        (enum.Enum("Local", "A").A, ["is not found under that name"]),
        ({"a": collections.deque([Unregistered()])}, ["obj['a']", "[0]"]),
        (UnregisteredData(), ["register_object_type(UnregisteredData) on every rank"]),
        ({"k": {Unregistered(): 1}}, ["obj['k'] (a key)"]),
        ([{1, Unregistered()}], ["obj[0] (an element)"]),
        (slice(None, Unregistered()), ["obj.stop"]),
        (with_attributes(collections.OrderedDict(), x=Unregistered()), ["obj (its attributes)"]),
        (Point(1.0, Unregistered()), ["obj (what Point encodes to)['y']"]),
        (lambda: 0, ["function"]),
        (np.array([object()]), ["dtype is object", "tolist"]),
        (np.zeros(2, [("a", "O")]), ["Python objects"]),
        (np.ma.masked_array([1]), ["filled", "x.mask"]),
        (np.zeros(1).view(np.recarray), ["numpy.asarray"]),
        (np.zeros(2, []), ["zero bytes"]),
        ([torch.zeros(2, device="meta")], ["obj[0]", "meta", "cpu()"]),
        (torch.zeros(2).to_sparse(), ["to_dense"]),
        (torch.zeros(2).as_subclass(type("Mine", (torch.Tensor,), {})), ["as_subclass"]),
        (sys, ["module"]),
        (memoryview(b"x"), ["memoryview"]),
        (type("I", (int,), {})(3), ["I"]),
        (collections.namedtuple("Bare", "x")(1), ["register_object_type(Bare)"]),
    ]:
        message = refusal(obj)
        assert all(part in message for part in parts), message
    assert "65536 bits" in refusal(fractions.Fraction(1, 1 << 70_000), ValueError)
    if hasattr(np.dtypes, "StringDType"):
        assert "StringDType" in refusal(np.array(["a"], dtype=np.dtypes.StringDType()))


def test_tensors_without_memory_of_their_own():
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    for tensor, part in [
        (torch._to_functional_tensor(torch.ones(3)), "functionalized tensor"),
        (torch._efficientzerotensor(3), "tensor of zeros without memory"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested tensor"),
        (freed, "its storage was freed"),
    ]:
        message = refusal({"a": tensor})
        assert "obj['a']: it " in message and part in message, message

    def inside(x):
        messages.append(refusal([x]))
        return x.sum()

    messages = []
    torch.vmap(inside)(torch.ones(2, 2))
    torch.func.grad(inside)(torch.ones(2))
    assert "inside torch.vmap" in messages[0] and "inside a transform" in messages[1], messages


def test_enums_that_the_receiver_has_not_imported():
    """Nothing is imported, and no attribute of a module or class is asked for."""
    payload = bytes(encode(Level.HIGH))
    module = sys.modules[Level.__module__]

    class Lazy(types.ModuleType):
        def __getattribute__(self, name):
            raise AssertionError(f"asked for {name}")

    for other in (Lazy("lazy"), types.SimpleNamespace(Level=Level), None):
        sys.modules[Level.__module__] = other
        try:
            with pytest.raises(CodecError, match="no enum that this process has imported"):
                decode(payload)
        finally:
            sys.modules[Level.__module__] = module
    assert decode(payload) is Level.HIGH


def test_registered_types_go_before_the_codecs_own():
    register_object_type(decimal.Decimal, lambda x: [str(x)], lambda x: (x[0], "mine"))
    try:
        assert decode(encode(decimal.Decimal("1.5"))) == ("1.5", "mine")
    finally:
        forget(decimal.Decimal)
    assert decode(encode(decimal.Decimal("1.5"))) == decimal.Decimal("1.5")


def test_the_way_to_a_deep_object_is_short():
    deep: object = object()
    for _ in range(100):
        deep = [deep]
    with pytest.raises(TypeError) as caught:
        encode({"a": deep})
    way = "obj['a']" + 5 * "[0]" + " (89 levels deeper) " + 6 * "[0]"
    assert f"cannot send {way}: it is of type builtins.object" in str(caught.value)


def test_failing_encode_function_is_named():
    register_object_type(Unregistered, lambda obj: 1 / 0, lambda value: None)
    try:
        assert "ZeroDivisionError" in refusal([Unregistered()])
        with pytest.raises(TypeError, match="ZeroDivisionError"):
            encode([Unregistered()], pickle=True)
    finally:
        forget(Unregistered)


def forget(cls):
    registry = sys.modules["hpcdist.codec._registry"]
    registry._by_type.pop(cls)
    registry._by_name.pop(registry.type_name(cls))


def test_cycles_and_depth():
    loop = [1]
    loop.append({"back": loop})
    assert "obj[1]['back']: it contains itself" in refusal(loop, ValueError)
    selfish = Point(1.0)
    selfish.y = [selfish]
    assert "contains itself" in refusal(selfish, ValueError)
    deep = []
    for _ in range(codec.MAX_DEPTH - 1):
        deep = [deep]
    equal(deep, decode(encode(deep)))
    assert "nested more than 128" in refusal([deep], ValueError)
    far = []
    for _ in range(100_000):
        far = [far]
    assert "nested more" in refusal(far, ValueError)
    while far:  # take it down step by step: deep deallocation is the interpreter's problem
        far = far[0]


def test_register_arguments():
    for bad in (3, "x", None):
        with pytest.raises(TypeError):
            register_object_type(bad)
    with pytest.raises(TypeError, match="needs both"):
        register_object_type(Slotted)
    with pytest.raises(TypeError, match="both encode and decode"):
        register_object_type(Unregistered, encode=vars)
    for known in (int, dict, np.float32, np.ndarray):
        with pytest.raises(ValueError, match="without registration"):
            register_object_type(known, vars, vars)


def test_receiving_what_is_not_registered_or_has_changed():
    register_object_type(UnregisteredData)
    payload = encode([UnregisteredData(3)])
    forget(UnregisteredData)
    with pytest.raises(CodecError, match="^the payload holds .*Data, which is not registered"):
        decode(payload)
    changed = dataclasses.make_dataclass("UnregisteredData", ["y"])
    changed.__module__, changed.__qualname__ = UnregisteredData.__module__, "UnregisteredData"
    register_object_type(changed)
    try:
        with pytest.raises(CodecError, match=r"decode function .* failed.*fields"):
            decode(payload)
    finally:
        forget(changed)
    with pytest.raises(CodecError, match="GREEN"):
        decode(encode(Colour.BLUE).replace(b"BLUE", b"GREEN").replace(
            struct.pack("<Q", 4), struct.pack("<Q", 5)))  # fmt: skip


class Evil:
    """Creates a file when unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_pickle_only_by_choice(tmp_path, monkeypatch):
    monkeypatch.delenv("HPCDIST_ALLOW_PICKLE", raising=False)
    path = str(tmp_path / "ran")
    refusal(Evil(path))
    refusal(Evil(path), pickle=False)
    payload = encode({"e": Evil(path), "a": 1}, pickle=True)
    for arguments in ({}, {"pickle": False}):
        with pytest.raises(CodecError, match=r"is a pickle.*pickle=True.*HPCDIST_ALLOW_PICKLE=1"):
            decode(payload, **arguments)
    with codec.allow_pickle(False), pytest.raises(CodecError):
        decode(payload)
    assert not os.path.exists(path)
    assert decode(payload, pickle=True)["a"] == 1
    assert os.path.exists(path)
    # what the codec carries is not pickled even when it may be
    equal(decode(encode([1, "a"], pickle=True), pickle=False), [1, "a"])


def test_pickle_choices_nest_and_the_environment_is_last(monkeypatch):
    monkeypatch.delenv("HPCDIST_ALLOW_PICKLE", raising=False)
    obj = Unregistered()
    with codec.allow_pickle():
        encode(obj)
        with codec.allow_pickle(False):
            refusal(obj)
            encode(obj, pickle=True)
        assert type(decode(encode(obj))) is Unregistered
    refusal(obj)
    monkeypatch.setenv("HPCDIST_ALLOW_PICKLE", "1")
    encode(obj)
    refusal(obj, pickle=False)
    with codec.allow_pickle(False):
        refusal(obj)
    with codec.allow_pickle():
        loop = []
        loop.append(loop)  # what the codec refuses, pickle takes
        copy = decode(encode(loop))
        assert copy[0] is copy


def test_header_errors():
    good = encode(1)
    for bad, match in [
        (b"", "does not begin"),
        (b"hpdo", "does not begin"),
        (pickle.dumps(1), "does not begin"),
        (good[:4] + b"\2" + good[5:], "format 2"),
        (good[:5] + b"X" + good[6:], "kind"),
        (good[:6] + b">" + good[7:], "byte order"),
        (good + b"N", "1 bytes follow"),
    ]:
        with pytest.raises(CodecError, match=match):
            decode(bad)
    assert issubclass(CodecError, ValueError)


def test_large_arrays_are_not_copied_item_by_item():
    array = np.arange(4_000_000, dtype=np.float32)
    tracemalloc.start()
    payload = encode({"w": array})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(payload) - array.nbytes < 200
    # one bytearray that grew, and nothing per item
    assert peak < 1.5 * array.nbytes
    assert len(encode(list(range(10_000)))) < 8 * 10_000 + 100


def test_one_element_with_a_stride():
    """A tensor of one element counts as contiguous whatever its stride is."""
    for tensor in (torch.arange(4.0)[::2][:1], torch.arange(6).reshape(3, 2)[1:2, :1]):
        back = decode(encode(tensor))
        assert torch.equal(back, tensor) and back.shape == tensor.shape
    array = np.arange(8.0)[::-3][:1]
    assert np.array_equal(decode(encode(array)), array)


def test_strides_as_with_pickle():
    """A dense tensor keeps its strides, as with torch's pickle: convolutions are slower without."""
    image = torch.randn(2, 3, 4, 5)
    dense = {
        "channels_last": image.to(memory_format=torch.channels_last),
        "channels_last_3d": torch.randn(2, 3, 1, 4, 5).to(memory_format=torch.channels_last_3d),
        "one channel": torch.randn(2, 1, 4, 5).to(memory_format=torch.channels_last),
        "kernel of 1 x 1": torch.randn(4, 3, 1, 1).to(memory_format=torch.channels_last),
        "transposed": torch.arange(6).reshape(2, 3).T,
        "permuted": image.to(torch.bfloat16).permute(2, 0, 3, 1),
        "contiguous": image,
        "empty": torch.empty(0, 3, 4, 5).to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(image.to(memory_format=torch.channels_last)),
        "scalar": torch.tensor(1.0),
        "one element": torch.arange(4.0)[::2][:1],
    }
    for name, tensor in dense.items():
        back, pickled = decode(encode(tensor)), pickle.loads(pickle.dumps(tensor))
        assert back.stride() == pickled.stride() == tensor.stride(), name
        assert torch.equal(back, tensor) and type(back) is type(tensor), name
        assert back.untyped_storage().nbytes() == tensor.nbytes, name
    ones = torch.ones(3, 1)
    # with gaps or overlaps the order of the dimensions is what remains
    for tensor in (dense["channels_last"][:, :2], dense["transposed"][:, :1], ones.expand(3, 4)):
        back = decode(encode(tensor))
        assert torch.equal(back, tensor) and back.stride() == tensor.clone().stride()


def test_codec_needs_no_torch():
    """An object without torch in it travels in a process that never imports torch."""
    code = (
        "import sys, types; sys.modules['torch'] = None\n"
        "package = types.ModuleType('hpcdist'); package.__path__ = [sys.argv[1]]\n"
        "sys.modules['hpcdist'] = package\n"
        "from hpcdist.codec import decode, encode\n"
        "print(decode(encode({'a': [1, 2.5]})))\n"
    )
    import hpcdist

    out = subprocess.run(
        [sys.executable, "-c", code, list(hpcdist.__path__)[0]],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert out.stdout == "{'a': [1, 2.5]}\n", out.stderr
