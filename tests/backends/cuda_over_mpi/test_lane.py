"""Lanes of messages of CUDA tensors: order within a key, none between keys, and no growth."""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from hpcdist.backends.cuda_over_mpi.lane import MANY, StagedJob, StagedWork, StagingLanes
from hpcdist.errors import DistBackendError, DistError

pytestmark = pytest.mark.local


@pytest.fixture
def lanes() -> StagingLanes:
    return StagingLanes("test-lane")


def job(run: Callable[[], Any]) -> StagedJob:
    return StagedJob(run, "a job of a test")


def test_idle_lanes_are_forgotten(lanes: StagingLanes) -> None:
    for key in range(10 * MANY):
        with lanes.use(key) as lane:
            lane.call(job(lambda: None))
        assert len(lanes) <= MANY


def test_busy_lanes_are_kept_and_others_do_not_wait_for_them(lanes: StagingLanes) -> None:
    go, done = threading.Event(), []
    for key in range(3 * MANY):
        with lanes.use(key) as lane:
            lane.start(job(lambda key=key: (go.wait(20.0), done.append(key))))
    for key in range(1000, 1000 + 2 * MANY):
        with lanes.use(key) as lane:
            lane.call(job(lambda: None))
    assert len(lanes) >= 3 * MANY and not done
    go.set()
    assert all(lane.idle(time.monotonic() + 20.0) for lane in lanes)
    assert sorted(done) == list(range(3 * MANY))
    for key in range(2000, 2000 + 10 * MANY):
        with lanes.use(key) as lane:
            lane.call(job(lambda: None))
    assert len(lanes) <= 8 * MANY


def test_a_lane_in_use_is_kept_though_it_is_idle(lanes: StagingLanes) -> None:
    with lanes.use("mine") as lane:
        for key in range(3 * MANY):
            with lanes.use(key) as other:
                other.call(job(lambda: None))
        with lanes.use("mine") as again:
            assert again is lane


def test_the_order_within_a_key_is_that_of_the_starts(lanes: StagingLanes) -> None:
    """Two threads start jobs of many keys while lanes are forgotten all the time."""
    seen: dict[int, list[int]] = defaultdict(list)
    problems = []

    def work(first: int) -> None:
        choose = random.Random(first)
        counts: dict[int, int] = defaultdict(int)
        for _ in range(3000):
            key = first + choose.randrange(3 * MANY)
            number = counts[key]
            counts[key] += 1
            with lanes.use(key) as lane:
                begin = lane.start if choose.random() < 0.7 else lane.call
                begin(job(lambda key=key, number=number: seen[key].append(number)))
        for key, count in counts.items():
            with lanes.use(key) as lane:
                lane.call(job(lambda: None))
            if seen[key] != list(range(count)):
                problems.append((key, seen[key]))

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 10_000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert not any(thread.is_alive() for thread in threads)
    assert not problems


def test_a_signal_handler_inside_a_job_is_refused(lanes: StagingLanes) -> None:
    """It would wait for a job that goes on only after it; what it begins is run afterwards."""
    seen: list[str] = []
    with lanes.use("key") as lane:
        later = job(lambda: seen.append("later"))

        def as_a_handler() -> None:
            with lanes.use("key") as same, pytest.raises(DistError, match="signal handler"):
                same.call(job(lambda: seen.append("never")))
            lane.start(later)
            work = StagedWork(None, 0, 0, later, [], [], [])
            with pytest.raises(DistError, match="signal handler called wait"):
                work.wait()
            seen.append("handled")

        lane.call(job(as_a_handler))
        assert later.done.wait(20.0)
        lane.call(job(lambda: seen.append("next")))
    assert seen == ["handled", "later", "next"]


@pytest.mark.parametrize("queued", [False, True], ids=["nothing", "a job"])
def test_a_callback_that_waits_for_what_comes_next(lanes: StagingLanes, queued: bool) -> None:
    """Of a handle's future, with ``queued`` behind it: it runs on the lane's thread."""
    go, over, seen = threading.Event(), threading.Event(), []
    first, second = job(lambda: go.wait(20.0)), job(lambda: seen.append("queued"))
    with lanes.use("key") as lane:

        def callback() -> None:
            for begin in (lane.start, lane.call):
                begin(inside := job(lambda: seen.append("inside")))
                assert inside.done.wait(20.0)
            over.set()

        first.when_done(callback)
        lane.start(first)
        if queued:
            lane.start(second)
        go.set()
        assert over.wait(10.0)
        lane.call(job(lambda: seen.append("next")))
        assert lane.idle(time.monotonic() + 20.0)
    assert seen == ["queued"] * queued + ["inside", "inside", "next"]


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), KeyboardInterrupt()])
def test_a_thread_that_cannot_be_started(
    lanes: StagingLanes, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """The operation fails and is not queued; the next one tries again."""
    seen: list[str] = []

    def fail(self: threading.Thread) -> None:
        raise error

    expected = DistBackendError if isinstance(error, RuntimeError) else KeyboardInterrupt
    with lanes.use("key") as lane:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", fail)
            lost = job(lambda: seen.append("lost"))
            with pytest.raises(expected):
                lane.start(lost)
            lane.call(job(lambda: seen.append("inline")))
        assert not lost.taken
        works = [job(lambda name=name: seen.append(name)) for name in ("one", "two")]
        for each in works:
            lane.start(each)
        assert all(each.taken and each.done.wait(20.0) for each in works)
        lane.call(job(lambda: seen.append("next")))
    assert seen == ["inline", "one", "two", "next"]


def test_a_handlers_exception_as_a_job_begins(lanes: StagingLanes) -> None:
    """Wherever it comes, the lane goes on."""
    condition = threading.Condition

    class Interrupting(condition):  # type: ignore[misc, valid-type]
        left = 0

        def __exit__(self, *about: object) -> None:
            super().__exit__(*about)  # type: ignore[arg-type]
            Interrupting.left -= 1
            if Interrupting.left == 0:
                raise KeyboardInterrupt

    for number in (1, 2):
        with lanes.use(number) as lane:
            lane._changed = Interrupting()
            Interrupting.left = number
            with pytest.raises(KeyboardInterrupt):
                lane.call(job(lambda: None))
            Interrupting.left = 0
            ran = threading.Event()
            thread = threading.Thread(target=lane.call, args=(job(ran.set),), daemon=True)
            thread.start()
            assert ran.wait(10.0)
            thread.join(10.0)
