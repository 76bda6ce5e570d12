"""One rank's mistakes: a call that hpcdist must refuse, on all ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

import hpcdist as dist
from chaos.cases import BUILDERS, Call, Case


def call(case: Case, how: str) -> Call:
    """The wrong call in place of the right one."""
    step = case.step
    if how == "call":
        other = "barrier" if step.op != "barrier" else "all_reduce"
        return BUILDERS[other](Case(replace(step, op=other), case.pg, case.wrap))[0]
    if how == "root":
        wrong = replace(step, root=(step.root + 1) % case.ranks)
        return BUILDERS[step.op](Case(wrong, case.pg, case.wrap))[0]
    if how == "dtype":
        wrong = replace(step, dtype="int32" if step.dtype != "int32" else "float32")
        if wrong.dtype == "int32" and step.reduction in ("AVG", "PREMUL_SUM"):
            wrong = replace(wrong, dtype="float64" if step.dtype == "float32" else "float32")
        if "int" not in wrong.dtype and step.reduction in ("BAND", "BOR", "BXOR"):
            wrong = replace(wrong, dtype="int64")
        return BUILDERS[step.op](Case(wrong, case.pg, case.wrap))[0]
    if how == "shape":
        return BUILDERS[step.op](Case(replace(step, size=step.size + 1), case.pg, case.wrap))[0]
    if how == "mode":
        right = BUILDERS[step.op](case)[0]
        return lambda async_op: right(not async_op)
    return _with_tensors(case, how)


def _with_tensors(case: Case, how: str) -> Call:
    """The right call with tensors that cannot be used."""
    torch_too = case.wrap(np.zeros(1)).__class__.__module__ == "torch"
    spoil = partial(_torch if torch_too else _numpy, how)
    return BUILDERS[case.step.op](Case(case.step, case.pg, spoil))[0]


def _numpy(how: str, array: np.ndarray) -> Any:
    if how == "gaps":
        return np.repeat(array, 2)[::2]
    if how == "none":
        return None
    if how == "text":
        return "tensor"
    if how == "endian":
        return array.astype(array.dtype.newbyteorder(">"))
    assert how == "locked", how
    array = array.copy()
    array.setflags(write=False)
    return array


def _torch(how: str, array: np.ndarray) -> Any:
    import torch

    tensor = torch.from_numpy(array.copy())
    if how == "gaps":
        return tensor.repeat_interleave(2)[::2]
    if how == "resized":
        tensor = tensor.clone()  # NumPy's memory cannot be resized
        tensor.untyped_storage().resize_(0)
        return tensor
    if how == "meta":
        return tensor.to("meta")
    if how == "sparse":
        return tensor.to_sparse()
    if how == "conj":
        return tensor.to(torch.complex64).conj()
    assert how == "none", how
    return None


def usable(group: Any) -> bool:
    """Whether a group still works, by an all_reduce with time enough."""
    before = group.timeout
    group.carrier.timeout = 10.0
    try:
        total = np.array([group.rank() + 1.0])
        dist.all_reduce(total, group=group)
        return bool(total[0] == group.size() * (group.size() + 1) / 2)
    finally:
        group.timeout = before
