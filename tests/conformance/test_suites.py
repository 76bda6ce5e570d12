"""hpcdist's suites after those that PyTorch does not ship: gloo, bridge and native module agree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jobs import run_job

pytestmark = [pytest.mark.jobs, pytest.mark.rare]

PROGRAM = str(Path(__file__).parent / "suites" / "compared.py")
#: Cases that a side passes at least, so that suites that shrank tell.
LEAST = {"gloo": 65, "bridge": 67, "native": 45}


@pytest.mark.slow
@pytest.mark.deadline(200)
def test_every_case_gives_what_it_gives_over_gloo() -> None:
    ended = run_job(4, PROGRAM)
    assert ended.code == 0, ended.text
    for side, least in LEAST.items():
        (passed,) = re.findall(rf"^{side}: (\d+) passed, 0 failed$", ended.text, re.M)
        assert int(passed) >= least, ended.text


@pytest.mark.any_mpi
def test_a_case_that_differs_or_fails_is_told() -> None:
    ended = run_job(2, PROGRAM, "broken")
    assert ended.code == 1, ended.text
    assert "failed" in ended.text and "where gloo has" in ended.text, ended.text
    assert "ZeroDivisionError" in ended.text, ended.text
    assert re.search(r"^gloo: 2 passed, 0 failed$", ended.text, re.M), ended.text
    assert re.search(r"^bridge: 1 passed, 1 failed$", ended.text, re.M), ended.text
    assert re.search(r"^native: 0 passed, 2 failed$", ended.text, re.M), ended.text
