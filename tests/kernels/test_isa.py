"""What the kernels refuse, and how their instruction set is chosen."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest

from hpcdist import _ops

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]

ISAS = _ops.available_isas()


def fails(function: Callable[..., None], *args: object) -> str:
    with pytest.raises((TypeError, ValueError)) as caught:
        function(*args)
    return f"{caught.type.__name__}: {caught.value}"


def test_refuses_what_it_cannot_do() -> None:
    buf, other = np.zeros(16, np.uint8), np.zeros(16, np.uint8)
    assert "TypeError: MAX has no meaning for complex" in fails(
        _ops.reduce_into, buf, other, "complex64", "MAX"
    )
    assert "TypeError: float8_e5m2 tensors can be moved" in fails(
        _ops.reduce_into, buf, other, "float8_e5m2", "SUM"
    )
    assert "TypeError: AVG has no meaning for bool" in fails(_ops.scale_div, buf, "bool", 2)
    assert "TypeError: PREMUL_SUM" in fails(_ops.scale_mul, buf, other, "int32", 2.0)
    assert "ValueError: the buffers differ in size: 16 and 8" in fails(
        _ops.reduce_into, buf, other[:8], "uint8", "SUM"
    )
    assert "ValueError: 15 bytes are no whole number of int32" in fails(
        _ops.reduce_into, buf[:15], other[:15], "int32", "SUM"
    )
    assert "ValueError: the buffers overlap" in fails(
        _ops.reduce_into, buf[:12], buf[4:], "int32", "SUM"
    )
    assert "ValueError: the buffers overlap" in fails(
        _ops.scale_mul, buf[:12], buf[4:], "float32", 2.0
    )
    assert "ValueError: the divisor must be 1 or more, not 0" in fails(
        _ops.scale_div, buf, "int32", 0
    )
    assert "ValueError: 'float' is no element type" in fails(
        _ops.reduce_into, buf, other, "float", "SUM"
    )
    assert "ValueError: 'sse' is not among the instruction sets" in fails(_ops.force_isa, "sse")
    assert not buf.any() and not other.any()


def isa_in_new_process(setting: str | None, *options: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key != "HPCDIST_SIMD"}
    if setting is not None:
        env["HPCDIST_SIMD"] = setting
    code = "from hpcdist import _ops; print(_ops.kernel_isa())"
    return subprocess.run(
        [sys.executable, *options, "-c", code], env=env, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("isa", ISAS)
def test_environment_chooses_the_instruction_set(isa: str) -> None:
    done = isa_in_new_process(isa)
    assert (done.stdout.strip(), done.returncode) == (isa, 0), done.stderr
    assert "HPCDIST_SIMD" not in done.stderr
    assert isa_in_new_process(isa.upper()).stdout.strip() == isa


def test_environment_naming_an_absent_instruction_set_warns() -> None:
    default = isa_in_new_process(None).stdout
    done = isa_in_new_process("sse9")
    assert done.stdout == default and default.strip() in ISAS
    assert "RuntimeWarning: HPCDIST_SIMD" in done.stderr and "scalar" in done.stderr
