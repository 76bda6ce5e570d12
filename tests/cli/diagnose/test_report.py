"""What diagnose concludes from several ranks, and how it prints it."""

from __future__ import annotations

import json

import pytest

from hpcdist.cli import diagnose
from hpcdist.cli.diagnose import advice, memory, reduce, report, whole
from hpcdist.cli.diagnose.section import FAULT, WARNING, Place, Section

pytestmark = pytest.mark.local


# --- the verdict ---------------------------------------------------------------------------------


def part(rank: int, host: str = "a", cpus: tuple[int, ...] = (), **more: object) -> dict:
    return {
        "rank": rank, "host": host, "machine": 8, "cpus": list(cpus or (2 * rank, 2 * rank + 1)),
        "link": 0.0, "sections": [], **more,
    }  # fmt: skip


def measured(best: float, **more: object) -> dict:
    return {
        "bytes": reduce.BYTES, "latency_s": 2e-6, "latency_best_s": 1e-6, "seconds": best,
        "best_s": best, "copy_bytes_per_s": 10e9, "calls": 9, "correct": True, **more,
    }  # fmt: skip


def judged(parts: list[dict], result: dict | None) -> dict:
    found = report.merge(parts)
    whole.judge(found, parts, result)
    return found


def test_what_memory_and_links_allow():
    assert reduce.expected(2, 2, 10e9, 0.0, 20) == pytest.approx(7 * 20 * 0.5 / 20e9)
    assert reduce.expected(2, 1, 10e9, 25e9, 20) == pytest.approx(2 * 20 * 0.5 / 25e9)
    assert reduce.expected(8, 4, 10e9, 25e9, 20) == pytest.approx(
        7 * 20 * 0.75 / 20e9 + 2 * 20 * 0.5 / 25e9
    )


@pytest.mark.parametrize(
    ("times", "verdict", "severity"),
    [(0.5, "good", None), (2.4, "good", None), (2.6, "slow", WARNING), (40.0, "slow", FAULT)],
)
def test_verdicts_within_a_host(times, verdict, severity):
    limit = reduce.expected(2, 2, 10e9, 0.0)
    found = judged([part(0), part(1)], measured(limit * times))
    assert found["all_reduce"]["verdict"] == verdict
    assert f"takes {times} times that" in found["all_reduce"]["explained"]
    assert [each["severity"] for each in found["findings"]] == ([severity] if severity else [])
    assert report.status(found) == (severity == FAULT)


def test_verdicts_between_hosts():
    parts = [part(0, "a", link=200.0), part(1, "b", link=100.0)]
    limit = 2 * reduce.BYTES * 0.5 / 12.5e9
    good = judged(parts, measured(limit * 2))
    assert good["all_reduce"]["expected_s"] == pytest.approx(limit) and not good["findings"]
    assert "estimate" in good["all_reduce"]["explained"]
    unknown = judged([part(0, "a"), part(1, "b")], measured(99.0))
    assert unknown["all_reduce"]["verdict"] == "not judged" and not unknown["findings"]


def test_ranks_that_share_cores_are_not_judged_and_each_host_has_its_own_cores():
    crowd = [part(rank, cpus=(0,), machine=1) for rank in range(2)]
    other = [part(rank, "b", cpus=(0, 1)) for rank in (2, 3)]
    found = judged([*crowd, *other], measured(99.0))
    assert [(each["section"], each["ranks"]) for each in found["findings"]] == [("binding", [0, 1])]
    assert "1 cores" in found["findings"][0]["what"]
    assert found["all_reduce"]["verdict"] == "not judged"


def test_a_wrong_sum_and_a_slow_scheduler_and_a_rank_alone():
    limit = reduce.expected(2, 2, 10e9, 0.0)
    wrong = judged([part(0), part(1)], measured(limit, correct=False))
    assert report.status(wrong) == 1 and "wrong sum" in wrong["findings"][0]["what"]
    late = judged([part(0), part(1)], measured(limit, latency_best_s=4e-3))
    assert "waits for a core" in late["findings"][0]["what"]
    busy = judged([part(0), part(1)], measured(limit, seconds=3 * limit))
    assert "something else uses" in busy["all_reduce"]["explained"]
    assert "not measured" in judged([part(0)], None)["all_reduce"]["explained"]


# --- the report ----------------------------------------------------------------------------------


def section_of(fact: tuple[str, object, str], *findings: tuple[str, str, str]) -> list[dict]:
    section = Section("one", "One")
    section.fact(*fact)
    for each in findings:
        section.find(*each)
    return [section.plain()]


def merged(*values: object, same: str, hosts: str = "aab", name: str = "x") -> dict:
    return report.merge([
        part(rank, hosts[rank], sections=section_of((name, value, same)))
        for rank, value in enumerate(values)
    ])  # fmt: skip


def test_ranks_that_differ():
    assert merged(1, 1, 1, same="job")["findings"] == []
    found = merged(1, 1, 2, same="job")["findings"]
    assert found[0]["severity"] == WARNING and found[0]["ranks"] == [0, 1, 2]
    assert "1 on ranks 0-1; 2 on ranks 2" in found[0]["what"]
    assert advice.give("environment") in found[0]["fix"]
    assert merged(1, 1, 2, same="host")["findings"] == []
    assert merged(1, 2, 2, same="host")["findings"][0]["ranks"] == [0, 1]
    assert merged(1, 2, 3, same="rank")["findings"] == []
    assert merged("a", "b", "b", same="job", name="hpcdist")["findings"][0]["severity"] == FAULT


def test_the_same_finding_of_several_ranks_is_one():
    found = report.merge([
        part(rank, sections=section_of(("x", 1, "job"), (FAULT, "broken", "repair it")))
        for rank in range(3)
    ])  # fmt: skip
    assert len(found["findings"]) == 1 and found["findings"][0]["ranks"] == [0, 1, 2]
    text = report.as_text(found)
    assert "FAULT: broken" in text and "fix: repair it" in text
    assert text.endswith("1 fault(s), exit status 1")
    plain = json.loads(report.as_json(found))
    assert plain["ok"] is False and plain["exit_status"] == 1 and plain["schema"] == report.SCHEMA
    assert plain["hosts"] == {"a": [0, 1, 2]} and plain["ranks"] == 3
    assert plain["sections"][0]["facts"] == [
        {"name": "x", "values": [{"value": 1, "ranks": [0, 1, 2]}]}
    ]


def test_a_check_that_breaks_is_a_finding(monkeypatch, tmp_path):
    def broken(place: Place) -> Section:
        raise ZeroDivisionError("no")

    monkeypatch.setattr(memory, "collect", broken)
    sections = diagnose.local(Place({}, tmp_path, frozenset({0})))
    (found,) = (
        each for section in sections for each in section.findings if "failed" in each["what"]
    )
    assert "ZeroDivisionError: no" in found["what"] and found["severity"] == WARNING
