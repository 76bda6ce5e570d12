"""``diagnose`` under mpirun: one report of all ranks, a verdict, an end where a rank is missing."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from jobs import run_job
from patience import patience

pytestmark = pytest.mark.jobs


def report_in(text: str) -> dict[str, Any]:
    """The JSON among what mpirun says itself."""
    assert text.count("{\n") and text.count('"schema"') == 1, text
    return json.JSONDecoder().raw_decode(text[text.index("{\n") :])[0]


def test_two_ranks_make_one_report_with_a_verdict():
    env = {"OMP_NUM_THREADS": "99", "HPCDIST_CHEK": "off"}
    ended = run_job(2, "-m", "hpcdist", "diagnose", "--json", env=env)
    found = report_in(ended.text)
    assert ended.code == 1 and found["exit_status"] == 1 and not found["ok"], ended.text
    assert found["ranks"] == 2 and list(found["hosts"].values()) == [[0, 1]]
    assert not ended.orphans

    facts = {f["name"]: f["values"] for section in found["sections"] for f in section["facts"]}
    assert facts["run time: thread level"] == [{"value": "multiple", "ranks": [0, 1]}]
    assert facts["run time: state"] == [{"value": "up", "ranks": [0, 1]}]
    assert facts["MPI's size"] == [{"value": 2, "ranks": [0, 1]}]
    assert [row["ranks"] for row in facts["MPI's rank"]] == [[0], [1]]
    assert all(
        row["value"].endswith("tried on another rank") for row in facts["CMA (process_vm_readv)"]
    )

    findings = {each["what"].partition(",")[0]: each for each in found["findings"]}
    threads = findings["OMP_NUM_THREADS=99"]
    assert threads["severity"] == "fault" and threads["ranks"] == [0, 1]
    assert findings["nothing reads HPCDIST_CHEK"]["fix"] == "export HPCDIST_CHECK=..."
    assert all(each["fix"] and each["ranks"] for each in found["findings"])

    measured = found["all_reduce"]
    assert measured["correct"] and measured["calls"] >= 3
    assert measured["verdict"] in ("good", "slow", "not judged")
    assert 0 < measured["latency_best_s"] <= measured["latency_s"] < measured["seconds"]
    assert 0 < measured["best_s"] <= measured["seconds"]
    assert measured["copy_bytes_per_s"] > 0
    if measured["verdict"] == "slow":
        assert any(each["section"] == "all_reduce" for each in found["findings"])


def test_a_rank_that_never_comes():
    sleeper = (":", "-n", "1", sys.executable, "-c", "import time; time.sleep(60)")
    ended = run_job(1, "-m", "hpcdist", "diagnose", "--json", "--timeout", "1.5", *sleeper)
    found = report_in(ended.text)
    assert ended.code != 0 and found["exit_status"] == 1
    (start,) = (each for each in found["findings"] if each["section"] == "start")
    assert "starting MPI" in start["what"] or "not joined" in start["what"], start
    assert "hostname" in start["fix"]
    assert ended.seconds < 25 * patience(), ended.seconds
