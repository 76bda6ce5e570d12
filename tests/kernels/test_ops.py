"""ReduceOp, and the tables of element types and of what reduces them."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.distributed

from hpcdist import _ops, dtypes
from hpcdist._ops import ReduceOp
from hpcdist.dtypes import DTYPES, lookup

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]

NAMES = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"]
TorchOp = torch.distributed.ReduceOp

# SPEC: what all_reduce promises, written out once more.
REFUSED = {
    "bool": {"AVG", "PREMUL_SUM"},
    "uint": {"PREMUL_SUM"},
    "int": {"PREMUL_SUM"},
    "float": {"BAND", "BOR", "BXOR"},
    "complex": {"PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"},
    "float8": set(NAMES),
}


@pytest.mark.parametrize("name", NAMES)
def test_members_are_those_of_torch(name: str) -> None:
    op = getattr(ReduceOp, name)
    assert op.name == name
    assert op.code == NAMES.index(name) == int(getattr(TorchOp.RedOpType, name))
    assert op.factor == 1.0
    assert repr(op) == f"ReduceOp.{name}"


@pytest.mark.parametrize("name", NAMES)
def test_members_survive_copying(name: str) -> None:
    op = getattr(ReduceOp, name)
    assert copy.copy(op) is copy.deepcopy(op) is pickle.loads(pickle.dumps(op)) is op


def test_compares_by_value() -> None:
    members = [getattr(ReduceOp, name) for name in NAMES]
    assert len(set(members)) == len(members)
    assert ReduceOp("sum") == ReduceOp.SUM and hash(ReduceOp("sum")) == hash(ReduceOp.SUM)
    assert ReduceOp.SUM != ReduceOp.MAX and ReduceOp.SUM != "SUM" and ReduceOp.SUM != 0
    assert ReduceOp.PREMUL_SUM(2.0) == ReduceOp.PREMUL_SUM(2) != ReduceOp.PREMUL_SUM(3)


def test_premul_sum_carries_its_factor() -> None:
    op = ReduceOp.PREMUL_SUM(0.25)
    assert (op.name, op.code, op.factor) == ("PREMUL_SUM", 8, 0.25)
    assert repr(op) == "ReduceOp.PREMUL_SUM(0.25)"
    assert pickle.loads(pickle.dumps(op)) == op == copy.deepcopy(op)
    assert ReduceOp.PREMUL_SUM(torch.tensor([0.5])).factor == 0.5
    assert ReduceOp.PREMUL_SUM(np.float32(0.5)).factor == 0.5
    assert ReduceOp.PREMUL_SUM(1) is ReduceOp.PREMUL_SUM
    assert op(4.0).factor == 4.0


def test_factors_that_make_no_sense() -> None:
    with pytest.raises(TypeError, match="ReduceOp.SUM takes no factor"):
        ReduceOp.SUM(2.0)
    for factor in ("half", None, torch.ones(2)):
        with pytest.raises(TypeError, match="must be a number or a tensor of one element"):
            ReduceOp.PREMUL_SUM(factor)
    for factor in (float("nan"), float("-inf")):
        with pytest.raises(ValueError, match="must be finite"):
            ReduceOp.PREMUL_SUM(factor)


def test_nothing_about_it_changes() -> None:
    with pytest.raises(AttributeError):
        ReduceOp.SUM.code = 3  # type: ignore[misc]
    with pytest.raises(AttributeError):
        ReduceOp.SUM.colour = "red"  # type: ignore[attr-defined]
    with pytest.raises(TypeError):
        ReduceOp.SUM = ReduceOp.MAX  # type: ignore[misc]


@pytest.mark.parametrize("name", NAMES)
def test_converts_names_and_torch_operations(name: str) -> None:
    member = getattr(ReduceOp, name)
    red_op = getattr(TorchOp.RedOpType, name)
    for other in (member, name, name.lower(), red_op, getattr(TorchOp, name)):
        assert ReduceOp(other) == member
    if name != "PREMUL_SUM":  # torch makes that one only with a factor, below
        assert ReduceOp(TorchOp(red_op)) == member


def test_converts_torch_premul_sum_with_its_factor() -> None:
    make = torch.distributed._make_nccl_premul_sum
    assert ReduceOp(make(0.25)) == ReduceOp.PREMUL_SUM(0.25)
    assert ReduceOp(make(torch.tensor([0.5]))) == ReduceOp.PREMUL_SUM(0.5)


@pytest.mark.parametrize("other", [None, 0, "MEAN", torch.add, object(), torch.float32])
def test_refuses_what_is_no_operation(other: object) -> None:
    with pytest.raises(TypeError, match="is not a reduce operation; use one of ReduceOp.SUM"):
        ReduceOp(other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_promised_combinations(name: str, dtype: dtypes.DType) -> None:
    promised = name not in REFUSED[dtype.kind]
    assert _ops.op_supported(name, dtype.code) is promised
    assert (name in dtype.ops) is promised
    why = _ops.op_refusal(getattr(ReduceOp, name), dtype.name)
    if promised:
        assert why is None
    else:
        assert why.startswith(dtype.name if dtype.kind == "float8" else name)


def test_refusals_of_no_type_and_no_operation() -> None:
    for dtype in (len(DTYPES), -1, "float", None):
        with pytest.raises(ValueError, match="is no element type"):
            _ops.op_supported("SUM", dtype)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="is not a reduce operation"):
        _ops.op_supported("MEAN", 0)


def test_codes_are_those_of_the_native_modules() -> None:
    assert tuple(dtype.name for dtype in DTYPES) == _ops.DTYPE_NAMES
    assert [dtype.code for dtype in DTYPES] == list(range(len(DTYPES)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_looks_up_every_way_of_naming_a_type(dtype: dtypes.DType) -> None:
    assert lookup(dtype) is lookup(dtype.code) is lookup(dtype.name) is dtype
    assert lookup(dtype.torch_dtype) is dtype
    assert dtype.torch_dtype.itemsize == dtype.itemsize
    assert dtype.torch_dtype.is_complex is (dtype.kind == "complex")
    assert dtype.torch_dtype.is_floating_point is (dtype.kind in ("float", "float8"))
    assert str(dtype) == dtype.name


@pytest.mark.parametrize("dtype", [d for d in DTYPES if hasattr(np, d.name)], ids=str)
def test_looks_up_numpy_types(dtype: dtypes.DType) -> None:
    assert dtype.numpy_dtype == np.dtype(dtype.name)
    assert dtype.numpy_dtype.itemsize == dtype.itemsize
    assert lookup(dtype.numpy_dtype) is lookup(dtype.numpy_dtype.type) is dtype


def test_numpy_types_with_other_names() -> None:
    assert lookup(np.longlong) is lookup(np.dtype("l")) is lookup("int64")
    assert lookup(np.dtype("=f4")).name == "float32"


@pytest.mark.skipif("ml_dtypes" in sys.modules, reason="NumPy has these types here")
@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn"])
def test_types_numpy_lacks(name: str) -> None:
    with pytest.raises(TypeError, match=f"NumPy has no dtype {name}"):
        _ = lookup(name).numpy_dtype


@pytest.mark.parametrize(
    "other",
    [torch.complex32, torch.qint8, np.dtype("U3"), np.longdouble, float, True, -1, 99, "f4"],
)
def test_refuses_what_is_no_element_type(other: object) -> None:
    with pytest.raises(TypeError, match="is no element type of hpcdist; it has bool, uint8"):
        lookup(other)


def test_refuses_foreign_byte_order() -> None:
    with pytest.raises(TypeError, match="not in this machine's byte order"):
        lookup(np.dtype("f8").newbyteorder())


def test_reducible_by() -> None:
    assert [d.name for d in dtypes.reducible_by("PREMUL_SUM")] == [
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
    ]
    assert lookup("bool") in dtypes.reducible_by("BXOR")
    with pytest.raises(ValueError, match="'MEAN' is no reduce operation"):
        dtypes.reducible_by("MEAN")


def test_the_table_needs_neither_torch_nor_numpy() -> None:
    code = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('dtypes', {dtypes.__file__!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "sys.modules['dtypes'] = module\n"
        "spec.loader.exec_module(module)\n"
        "assert module.lookup('bfloat16').itemsize == 2\n"
        "assert not {'torch', 'numpy', 'hpcdist'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
