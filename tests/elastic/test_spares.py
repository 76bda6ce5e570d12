"""Jobs with spares: where one joins, what it cannot call, and what such a job refuses.

How training ends after deaths is compared with a run without any, bit for bit. A job takes several
seconds to start, so it has as few ranks and as many cases as can be told apart.
"""

from __future__ import annotations

import functools
import random
import re
from pathlib import Path

import pytest
from jobs import Ended, run_job
from kill_jobs import differing_with_spares, draw_with_spares, train
from long_form import LONG, deadline, size
from mpis import OPEN_MPI
from ulfm import only_ulfm

PROGRAM = str(Path(__file__).with_name("spares.py"))
EXAMPLE = str(Path(__file__).parents[2] / "examples" / "train_digits_elastic.py")
pytestmark = [pytest.mark.jobs, pytest.mark.rare]


def run(
    case: str, spares: str = "1", np: int = 4, ft: str = "1", env: dict[str, str] | None = None
) -> Ended:
    env = {"HPCDIST_FT": ft, "HPCDIST_SPARES": spares} | (env or {})
    ended = run_job(np, PROGRAM, case, env=env, ft=True, limit=80)
    assert not ended.orphans, (ended.orphans, ended.text)
    return ended


def ends(text: str) -> list[str]:
    return sorted(re.findall(r"^end (.*)", text, re.MULTILINE))


@functools.cache
def wanted(kind: str = "sgd") -> list[str]:
    """The ends of the ranks without a death."""
    ended = ends(run(f"none,{kind}").text)
    assert len(ended) == 3, ended
    return ended


@only_ulfm
@pytest.mark.slow
@deadline(300, long=3600)
def test_it_ends_as_without_deaths(count):
    rng = random.Random()
    endings = [
        train(kind, draw_with_spares(rng, victims, 2), limit=80, spares=2)
        for kind, victims in [("norm", 2), ("zero", 1)] * size(1, 25)
    ]
    for ending in endings:
        assert ending.sizes == "4" * len(ending.sizes), ending.text
        assert ending.again < (2.0 if LONG else 10.0), ending.text
        count(1, ending.again)
    assert not differing_with_spares(endings, size(60, 600))


@only_ulfm
@pytest.mark.slow
@deadline(200, long=3600)
def test_it_ends_so_where_a_spare_is_on_another_node(monkeypatch, count):
    """The run without deaths has other ranks on its second node."""
    for name in "NODES=2", "TWO_LEVEL=on", "DETERMINISTIC=layout":
        monkeypatch.setenv(*f"HPCDIST_{name}".split("="))
    rng = random.Random()
    endings = [
        train("adam", draw_with_spares(rng, 1, 2), limit=80, spares=2) for _ in range(size(1, 25))
    ]
    count(len(endings))
    assert not differing_with_spares(endings, size(60, 600))


@only_ulfm
@pytest.mark.slow
@pytest.mark.deadline(280)
def test_a_former_spare_enters_the_loop_where_the_others_are():
    ended = run("calls,second")
    assert ends(ended.text) == wanted(), ended.text
    assert ended.text.count("refused") == ended.text.count(" True") == 7, ended.text
    assert "place 1 3 1" in ended.text, ended.text
    says = "a program with spares (HPCDIST_SPARES) has one State"
    assert ended.text.count(says) >= 3, ended.text
    for cases in ("commit first,every,exit", "resume first,two loops"):
        ended = run(cases)
        assert ends(ended.text) == wanted(), ended.text


@only_ulfm
@pytest.mark.slow
@pytest.mark.deadline(280)
def test_a_former_spare_enters_a_loop_of_the_programs_own():
    """Where the others have resumed or not, and where they keep commits for the next start."""
    for cases, job in (("own,resumed", ""), ("own", ""), ("own,finally", "test-spares")):
        ended = run(cases, env={"HPCDIST_COMMIT_JOB": job} if job else {})
        assert ended.code == 0 and ends(ended.text) == wanted(), ended.text


@only_ulfm
@pytest.mark.slow
@pytest.mark.deadline(280)
def test_the_rank_that_has_the_copy_dies_when_a_former_spare_has_got_it():
    for kind in ("sgd", "zero"):
        ended = run(f"holder,{kind}", "2", 5)
        assert ends(ended.text) == wanted(kind), ended.text
        # in which the others had waited for it
        assert max(map(float, re.findall(r"recovered (\S+)", ended.text))) >= 0.5, ended.text


@only_ulfm
@pytest.mark.slow
@pytest.mark.deadline(280)
def test_ranks_go_on_with_their_spares_after_a_signal_handler_has_raised(tmp_path):
    """All return to the last commit; none has died. In the step after that one does."""
    ended = run("own,handler", env={"HPCDIST_TEST_FOLDER": str(tmp_path)})
    assert ended.code == 0 and ends(ended.text) == wanted(), ended.text
    assert "spares left: 1" in ended.text and "spares left: 0" in ended.text, ended.text


@only_ulfm
@pytest.mark.slow
def test_spares_that_cannot_wait_any_more_end_and_the_job_goes_on(tmp_path):
    ended = run("wait", "2", 5, env={"HPCDIST_TEST_FOLDER": str(tmp_path)})
    assert ended.text.count("this spare cannot wait any more") == 2, ended.text
    for kind in ("RuntimeError", "SystemExit"):
        assert ended.text.count(f"{kind}: of the wait") == 1, ended.text
    assert [each[:5] for each in ends(ended.text)] == ["0/2 8", "1/2 8"], ended.text


@only_ulfm
@pytest.mark.slow
@pytest.mark.deadline(280)
def test_a_spare_that_dies_before_the_first_commit_costs_nothing(tmp_path):
    ended = run("early spare", "2", 5, env={"HPCDIST_TEST_FOLDER": str(tmp_path)})
    assert ends(ended.text) == wanted(), ended.text


@only_ulfm
@pytest.mark.slow
@pytest.mark.deadline(280)
@pytest.mark.parametrize(
    ("case", "spares", "says"),
    [
        ("uncovered", 1, "of a DistributedDataParallel is not in the State"),
        ("neighbours", 2, "StateLostError: what the former rank 1 alone had"),
    ],
)
def test_what_cannot_go_on_is_an_error_on_all_ranks(case, spares, says):
    ended = run(case, str(spares), 3 + spares)
    assert ended.text.count(says) >= 3, ended.text


@only_ulfm
@pytest.mark.slow
@pytest.mark.deadline(280)
def test_a_job_whose_ranks_cannot_be_replaced_ends():
    ended = run("early")
    assert "rank 1 of the job died" in ended.text and not ends(ended.text), ended.text
    ended = run("raises")
    assert "RuntimeError: of the program" in ended.text and not ends(ended.text), ended.text
    ended = run("all")
    assert "spares alone are left" in ended.text and not ends(ended.text), ended.text


@only_ulfm
@pytest.mark.slow
@pytest.mark.deadline(280)
def test_each_rank_of_the_example_kills_itself_once():
    """Not the former spares in their places again."""
    env = {"HPCDIST_FT": "1", "HPCDIST_SPARES": "3"}
    ended = run_job(6, EXAMPLE, "--epochs", "2", "--kill", "1", "2", env=env, ft=True, limit=120)
    assert ended.code == 0 and "3 ranks began, 3 ended; 48 steps" in ended.text, ended.text
    lost = re.findall(r"^lost: rank (\d)", ended.text, re.MULTILINE)
    assert lost == ["1", "2"], ended.text


@only_ulfm
@pytest.mark.parametrize(
    ("spares", "np", "ft", "case", "says"),
    [
        ("2", 2, "1", "none", "leaves no rank of the 2 that were started"),
        ("1", 3, "", "none", "needs HPCDIST_FT=1"),
        ("-1", 2, "1", "none", "HPCDIST_SPARES='-1' is not valid"),
        ("1", 3, "1", "different", "HPCDIST_SPARES is 0 on rank 0, and 1 on rank 1"),
    ],
)
def test_settings_that_make_no_sense_are_errors_on_all_ranks(spares, np, ft, case, says):
    ended = run(case, spares, np, ft)
    assert ended.text.count(says) >= np and not ends(ended.text), ended.text


def test_a_job_without_fault_tolerance_has_no_spares():
    env = {"HPCDIST_FT": "1", "HPCDIST_SPARES": "1"}
    ended = run_job(3, PROGRAM, "none", env=env, limit=60)
    why = "started without it" if OPEN_MPI else "this MPI has no fault tolerance"
    assert ended.text.count("HPCDIST_SPARES=1 cannot be had") >= 3, ended.text
    assert why in ended.text, ended.text
