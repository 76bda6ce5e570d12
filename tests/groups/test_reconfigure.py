"""A rank dies: the others raise, reconfigure the world, and go on; or the job says why not.

DistributedSampler follows.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jobs import run_job
from long_form import LONG
from mpis import OPEN_MPI
from no_threads import preloaded
from patience import at_most, patience
from ulfm import only_ulfm

pytestmark = [pytest.mark.jobs, pytest.mark.rare]

PROGRAM = str(Path(__file__).with_name("survivors.py"))
ENDINGS = str(Path(__file__).parents[1] / "engine" / "endings.py")
FT = {"HPCDIST_FT": "1"}
#: A job of four ranks can lose three.
OPERATIONS = [
    ("carried", "node", "library"),
    ("asynchronous", "ring", "any"),
    ("groups", "pairs", "objects"),
    ("barrier", "asynchronous", "groups"),
]
ON_TWO_NODES = [("levels", "carried", "objects"), ("asynchronous", "library", "groups")]
#: Where the ranks are.
PLACES = {
    "one": {},
    "apart": {"HPCDIST_CHECK_TRANSPORT": "mpi"},
    "two": {"HPCDIST_NODES": "2", "HPCDIST_TWO_LEVEL": "on"},
}


def crashed_in_open_mpi(text: str) -> bool:
    """Whether a rank died where Open MPI itself crashes for it: docs/surviving.md, Limits."""
    return all(where in text for where in ("ompi_comm_revoke_local", "PMPI_Comm_create_group"))


@only_ulfm
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10 if LONG else 1))
@pytest.mark.parametrize(
    ("names", "place"),
    [(OPERATIONS[i], "apart" if i % 2 else "one") for i in range(4)]
    + [(OPERATIONS[i], "one" if i % 2 else "apart") for i in range(4 if LONG else 0)]
    + [(names, "two") for names in (OPERATIONS if LONG else []) + ON_TWO_NODES],
    ids=lambda given: given if isinstance(given, str) else given[0],
)
def test_the_others_go_on_without_a_rank_that_dies(names, place, seed, count):
    for attempt in range(3):
        chosen = str(seed + 1000 * attempt)
        env = {**FT, **PLACES[place], "HPCDIST_TEST_SEED": chosen}
        ended = run_job(4, PROGRAM, *names, env=env, ft=True)
        assert not ended.orphans, (ended.orphans, ended.text)
        if not crashed_in_open_mpi(ended.text):
            break
    assert ended.code == 0, ended.text
    for left, name in zip((3, 2, 1), names, strict=True):
        assert f"survived {name}: {left} left" in ended.text, ended.text
    assert "ended" in ended.text, ended.text
    assert not ended.shm, (ended.shm, ended.text)
    count(len(names))


@only_ulfm
@pytest.mark.parametrize("transport", ["auto", "mpi"], ids=["page", "messages"])
def test_a_world_without_a_death_is_reconfigured_soon(transport, count):
    program = str(Path(__file__).with_name("reconfigurations.py"))
    env = {**FT, "HPCDIST_CHECK_TRANSPORT": transport}
    ended = run_job(3, program, "20", env=env, ft=True)
    assert ended.code == 0, ended.text
    took = re.search(r"half of them took less than ([0-9.]+) s, of ([0-9.]+) allowed", ended.text)
    assert took, ended.text
    assert float(took[1]) < float(took[2]), ended.text
    count(20)


@only_ulfm
def test_a_rank_that_dies_while_it_holds_memory_is_reported_at_once(count):
    program = str(Path(__file__).with_name("killed_holding.py"))
    for _ in range(3):
        ended = run_job(3, program, env=FT, ft=True, limit=60)
        assert ended.code == 0, ended.text
        assert ended.text.count("went on") == 2, ended.text
        if "it held no memory" not in ended.text:
            break
    died = re.search(r"died ([0-9.]+)", ended.text)
    told = re.findall(r"told ([0-9.]+) (.*)", ended.text)
    assert died and len(told) == 2, ended.text
    for when, text in told:
        assert "rank 2 " in text and "accumulate" in text, text
        assert float(when) - float(died[1]) < at_most(5), ended.text
    assert not ended.shm, (ended.shm, ended.text)
    count(1)


@only_ulfm
def test_errors_of_other_nodes_name_the_dead(count):
    """Some named nobody, and the recovery that follows excluded nobody: Open MPI had not told."""
    program = str(Path(__file__).with_name("named_dead.py"))
    for _ in range(3):
        ended = run_job(3, program, env=FT | {"HPCDIST_NODES": "3"}, ft=True, limit=60)
        assert ended.code == 0 and ended.text.count("went on with 2") == 2, ended.text
        assert ended.text.count("named (2,)") == 2, ended.text
    count(3)


@only_ulfm
def test_agreements_are_right_while_another_thread_is_in_mpi(count):
    """Six of 2,000 flags were wrong, as MPI alone gave them."""
    ended = run_job(3, str(Path(__file__).with_name("agreements.py")), "2000", env=FT, ft=True)
    assert ended.code == 0, ended.text
    assert ended.text.count(": 0 wrong") == 3, ended.text
    count(2000)


@only_ulfm
@pytest.mark.parametrize("what", ["session", "group"])
def test_an_agreement_that_was_given_up_writes_to_no_freed_memory(what):
    program = str(Path(__file__).with_name("given_up.py"))
    ended = run_job(2, program, what, env=FT, ft=True, limit=40)
    assert "kept" in ended.text and "MPI wrote" not in ended.text, ended.text


@only_ulfm
@pytest.mark.parametrize("before", ["alive", "killed"])
def test_a_new_world_whose_watchdog_cannot_start_is_an_error_on_all_ranks(before, tmp_path):
    program = str(Path(__file__).with_name("no_watchdog.py"))
    env = FT | preloaded(tmp_path)
    ended = run_job(3, program, before, env=env, ft=True, limit=60)
    left = 2 if before == "killed" else 3
    assert ended.code == 0 and ended.text.count("went on") == left, ended.text
    assert not ended.orphans, (ended.orphans, ended.text)


def test_a_job_that_cannot_go_on_says_so_at_its_start():
    ended = run_job(2, PROGRAM, "carried", env=FT)
    assert ended.code != 0, ended.text
    why = "started without it: start it with" if OPEN_MPI else "this MPI has no fault tolerance"
    assert ended.text.count("a rank that dies will end this job") == 1, ended.text
    assert why in ended.text, ended.text
    assert "supports_reconfigure is False" in ended.text, ended.text


@only_ulfm
def test_a_job_that_was_not_asked_to_go_on_ends_with_the_rank():
    ended = run_job(2, ENDINGS, "killed", "collective", env={"HPCDIST_FT": ""}, ft=True)
    # this mpirun ends with status 0, also after MPI_Abort
    assert ended.seconds < 10 * patience(), (ended.seconds, ended.text)
    assert not ended.orphans, (ended.orphans, ended.text)
    assert "died without leaving its process group" in ended.text, ended.text
    assert "will end this job" not in ended.text, ended.text


@only_ulfm
def test_a_rank_that_is_stopped_in_a_recovery_is_given_up():
    ended = run_job(4, str(Path(__file__).with_name("stops_in_recovery.py")), env=FT, ft=True)
    assert ended.code == 0 and not ended.orphans, (ended.code, ended.orphans, ended.text)
    assert ended.seconds < 25 * patience(), (ended.seconds, ended.text)
    assert re.search(r"rank 1 \(pid \d+\) has been stopped for", ended.text), ended.text
    assert ended.text.count("2 go on") == 2, ended.text
