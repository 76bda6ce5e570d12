"""How jobs end when a rank fails: in time, with a status and a text that name the rank."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from jobs import Ended, run_job
from long_form import LONG, deadline, size
from patience import at_most, patience

pytestmark = [pytest.mark.jobs, pytest.mark.rare]

PROGRAMS = str(Path(__file__).with_name("endings.py"))

#: Seconds. The promise is 2, and 5 after a SIGKILL; the short form may share its cores with
#: anything, and the launcher's own teardown is on top.
IN_TIME = 2.0 if LONG else 8.0
AFTER_A_KILL = 5.0 if LONG else 10.0
AT_ONCE = 0.1 if LONG else 2.0


def is_clean(ended: Ended) -> None:
    """Nothing of the job may be left."""
    assert not ended.orphans, (ended.orphans, ended.text)
    assert not ended.shm, (ended.shm, ended.text)


def is_failure(ended: Ended, seconds: float = IN_TIME) -> None:
    """A job that ended as it must when a rank failed: not with 0, in time, and wholly."""
    assert ended.code != 0, ended.text
    assert ended.seconds < seconds * patience(), (ended.seconds, ended.text)
    is_clean(ended)


SAYS = {
    "exception": r"hpcdist rank 1 of 2\] unhandled ValueError",
    "sys_exit": r"rank 1\b.* (has left the job|exits with status 3)",
    "os_exit": r"hpcdist rank 1 of 2\] os\._exit\(0\)",
    "terminated": r"rank 1 \(pid \d+\) died without leaving",
    "killed": r"rank 1 \(pid \d+\) died without leaving",
}
#: What the rank does, what the others do meanwhile, who started MPI.
ENDINGS = [
    (program, others, starter)
    for number, program in enumerate(SAYS)
    for others in ("collective", "idle")
    for starter in ("hpcdist", "mpi4py")
    # the short form: each of them with half of the others
    if LONG or (others == "idle") == ((starter == "mpi4py") ^ (number % 2))
]


@pytest.mark.parametrize(("program", "others", "starter"), ENDINGS)
def test_a_rank_that_fails_ends_the_job(program, others, starter, count):
    ended = run_job(2, PROGRAMS, program, others, *([starter] if starter == "mpi4py" else []))
    is_failure(ended)
    says = SAYS[program]
    if starter == "mpi4py" and program == "sys_exit":
        says += r"|hpcdist rank 1 of 2\] exits with an error"
    assert re.search(says, ended.text), ended.text
    if others == "collective" and program == "exception" and starter == "hpcdist":
        assert "RankFailedError: rank 1 of group 'world' failed" in ended.text, ended.text
    count(1, ended.seconds)


@pytest.mark.parametrize("how", ["raises", "killed"])
def test_a_rank_that_fails_in_the_middle_of_backward(how):
    ended = run_job(2, PROGRAMS, "in_backward", how)
    is_failure(ended, IN_TIME if how == "raises" else AFTER_A_KILL)
    if how == "killed":
        says = r"rank 1 \(pid \d+\) died .*this rank is in DistributedDataParallel #\d+: aborting"
        assert re.search(says, ended.text), ended.text
        return
    # Rank 0 hears of the end of that backward, or already of the end of that rank.
    error = (
        r"(DistMismatchError: .*\n.*\n  rank 1: DistributedDataParallel: backward ended without all"
        r"|RankFailedError: rank 1 .*ValueError: boom.*join DistributedDataParallel\(float32)"
    )
    assert re.search(f"rank 0 backward: {error}", ended.text), ended.text
    assert re.search(f"rank 0 forward: .*earlier backward pass failed \\({error}", ended.text)
    assert "never waited for" not in ended.text, ended.text


def test_a_job_that_ends_while_it_makes_shared_memory_leaves_no_file():
    ended = run_job(2, PROGRAMS, "ended_while_sharing")
    assert "0123456789abcdef" in ended.text, ended.text
    is_failure(ended)


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        (2, "rank 1 of group 'world' has left the job"),
        (3, r"all other ranks of group 'world' \(ranks 1, 2\) have failed or left the job"),
    ],
)
def test_a_receive_from_any_rank_names_those_that_have_left(ranks, says):
    ended = run_job(ranks, PROGRAMS, "received_from_any")
    assert re.search(f"rank 0: {says}.*recv.* cannot complete", ended.text), ended.text
    is_clean(ended)


@deadline(60, long=3600)
def test_a_rank_killed_while_data_moves(count):
    """At random moments, in whatever the others are then: they name the dead rank, and where."""
    slowest, rounds = 0.0, size(4, 100)
    for number in range(rounds):
        count.progress(number, rounds)
        np = (2, 3, 4)[number % 3]
        victim, after = random.randrange(np), random.uniform(0.02, 0.7)
        what = f"rank {victim} of {np} killed after {after:.3f} s"
        ended = run_job(np, PROGRAMS, "killed_at_work", str(victim), f"{after:.3f}")
        is_failure(ended, AFTER_A_KILL + after)
        where = r"(all_reduce|reduce_scatter|all_gather|all_to_all|broadcast)\w* #\d+"
        named = rf"rank {victim} \(pid \d+\) died .*{where}: aborting the job"
        assert re.search(named, ended.text), (what, ended.text)
        slowest = max(slowest, ended.seconds - after)
    count(rounds, slowest)


@pytest.mark.parametrize("where", ["collective", "wait", "lane"])
def test_ctrl_c_that_nobody_handles_ends_the_job(where, count):
    ended = run_job(2, PROGRAMS, "unhandled_ctrl_c", where)
    is_failure(ended, IN_TIME + 0.5)
    assert "rank 1 of 2] unhandled KeyboardInterrupt" in ended.text, ended.text
    count(1, ended.seconds - 0.3)


@pytest.mark.parametrize("where", ["collective", "recv", "wait", "lane", "busy"])
def test_ctrl_c_interrupts_and_the_group_goes_on(where, count):
    ended = run_job(2, PROGRAMS, "interrupted", where)
    assert ended.code == 0, ended.text
    after = re.search(r"interrupted after ([0-9.]+) s", ended.text)
    assert after and float(after[1]) < at_most(0.5), ended.text
    assert ended.text.count("went on") == 2, ended.text
    if where == "collective":
        assert "late: this rank arrived too late: rank 0 gave up" in ended.text, ended.text
    if where == "lane":
        assert "late: rank 0 could not take part: a signal handler raised" in ended.text, ended.text
    is_clean(ended)
    count(1, float(after[1]))


def test_dropped_operations_complete_at_exit():
    ended = run_job(2, PROGRAMS, "outstanding")
    assert ended.code == 0, ended.text
    assert ended.text.count("ends") == 2 and "Traceback" not in ended.text, ended.text


def test_an_end_with_operations_that_nobody_joins_is_an_error():
    ended = run_job(2, PROGRAMS, "forgotten")
    is_failure(ended, 3 + IN_TIME)  # it gives them 3 s
    assert "rank 0 of 2] the program ends with operations" in ended.text, ended.text


def test_a_rank_that_is_at_its_end_lets_the_others_work():
    """It has messages that MPI_Finalize would wait for, and it may not leave without that."""
    ended = run_job(2, PROGRAMS, "outlived", env={"HPCDIST_CHECK_TRANSPORT": "mpi"})
    assert ended.code == 0, ended.text
    assert ended.text.count("has worked") == 2, ended.text
    is_clean(ended)


def test_a_failure_nobody_waited_for_is_told():
    ended = run_job(2, PROGRAMS, "unseen")
    assert "rank 0 of 2] an operation failed and its Work was never waited for" in ended.text, (
        ended.text
    )


def test_a_forked_child_is_told_and_the_parent_goes_on(count):
    ended = run_job(2, PROGRAMS, "forked")
    assert ended.code == 0, ended.text
    assert ended.text.count("child told") == 2 and ended.text.count("went on") == 2, ended.text
    is_clean(ended)
    count(1)


def test_a_forked_child_takes_no_message_of_its_parent():
    """Asking a handle about its operation would take what the parent waits for out of MPI."""
    ended = run_job(2, PROGRAMS, "forked_handles")
    assert ended.code == 0, ended.text
    assert ended.text.count("child told") == 1 and ended.text.count("went on") == 2, ended.text
    is_clean(ended)


def test_children_of_multiprocessing_are_told_and_the_parent_goes_on(count):
    ended = run_job(2, PROGRAMS, "multiprocessing_fork")
    assert ended.code == 0, ended.text
    # two children on each rank, six calls each
    told = [float(s) for s in re.findall(r"child told after ([0-9.]+) s", ended.text)]
    assert len(told) == 24 and max(told) < AT_ONCE * patience(), ended.text
    assert ended.text.count("went on") == 2, ended.text
    is_clean(ended)
    count(24, max(told))


def test_training_with_forked_data_loaders(count):
    ended = run_job(2, PROGRAMS, "data_loader")
    assert ended.code == 0, ended.text
    assert ended.text.count("trained 16 steps") == 2, ended.text
    is_clean(ended)
    count(1)


@pytest.mark.parametrize(
    "state",
    ["destroyed", "groups", "futures", "cycle", "thread", "atexit", "del", "many"]
    if LONG
    else ["destroyed", "futures", "thread", "atexit", "groups cycle del many"],
)
def test_the_interpreter_may_end_in_any_state(state, count):
    ended = run_job(2, PROGRAMS, "ends_anyhow", *state.split())
    assert ended.code == 0, ended.text
    assert ended.text.count("ends") == 2 and "Traceback" not in ended.text, ended.text
    is_clean(ended)
    count(1)


def test_a_program_between_nodes_may_finalize_mpi_itself(count):
    ended = run_job(2, PROGRAMS, "ends_anyhow", "finalized", env={"HPCDIST_NODES": "2"})
    assert ended.code == 0, ended.text
    assert ended.text.count("ends") == 2 and "abort" not in ended.text.lower(), ended.text
    is_clean(ended)
    count(1)


@pytest.mark.parametrize(
    "how", ["irecv", "irecv mpi4py", "thread", "callback", "destroy", "new_group"]
)
def test_no_thread_is_inside_mpi_when_it_ends(how):
    ended = run_job(2, PROGRAMS, "ends_with_messages", *how.split())
    assert ended.code == 0 and ended.text.count("ends\n") >= 2, ended.text
    assert "terminate called" not in ended.text, ended.text
    is_clean(ended)


def test_a_stopped_rank_is_named():
    ended = run_job(2, PROGRAMS, "stopped")
    assert ended.code == 0, ended.text
    named = re.search(r"rank 0 after ([0-9.]+) s: timeout .*rank 1 has not joined", ended.text)
    assert named and 2.4 < float(named[1]) < 2.5 + at_most(1.0), ended.text
    assert "no sign of life" in ended.text, ended.text
    assert ended.text.count("went on") == 2, ended.text


def test_a_rank_stopped_in_the_middle_of_all_reduce_is_named():
    ended = run_job(2, PROGRAMS, "stopped_at_work")
    assert ended.code == 0, ended.text
    named = re.search(
        r"rank 0 after ([0-9.]+) s: timeout .*(no data from rank 1|rank 1 has not joined)",
        ended.text,
    )
    assert named and 2.4 < float(named[1]) < 2.5 + at_most(1.0), ended.text
    assert "no sign of life" in ended.text, ended.text
    assert ended.text.count("went on") == 2, ended.text
    is_clean(ended)


def test_the_watchdog_ends_an_unchecked_call_that_cannot_end():
    ended = run_job(2, PROGRAMS, "unchecked")
    is_failure(ended, 1.5 + IN_TIME)  # the call's timeout, half a second later
    assert re.search(
        r"rank 0 of 2, .*all_reduce #\d+ of group .* has been moving data", ended.text
    ), ended.text
