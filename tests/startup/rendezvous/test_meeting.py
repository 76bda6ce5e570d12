"""The roll call: all ranks come, or all that came raise the same, in time."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from patience import at_most

from hpcdist import DistMismatchError, DistNetworkError, DistTimeoutError
from hpcdist.startup.rendezvous import meeting
from hpcdist.store import HashStore, PrefixStore

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]

OWN = threading.local()


@pytest.fixture(autouse=True)
def each_thread_is_a_process(monkeypatch):
    monkeypatch.setattr(meeting, "_own_token", lambda: getattr(OWN, "token", "main"))


def meet_all(store, places, seconds=5.0, agree=()):
    """Hold a meeting with one thread for each (rank, size); what came of it, in their order."""

    def one(number, rank, size):
        OWN.token = f"process {number}"
        said = agree[number] if agree else ""
        began = time.monotonic()
        try:
            found = meeting.hold_roll_call(
                store, rank, size, seconds, "somewhere", {"n": number}, said
            )
        except (RuntimeError, ValueError) as error:
            found = error
        return found, time.monotonic() - began

    with ThreadPoolExecutor(len(places)) as pool:
        jobs = [pool.submit(one, n, rank, size) for n, (rank, size) in enumerate(places)]
        return [job.result()[0] for job in jobs], max(job.result()[1] for job in jobs)


def test_all_come_and_know_each_other():
    store = HashStore()
    met, _ = meet_all(store, [(2, 3), (0, 3), (1, 3)])
    assert [one.rank for one in met] == [2, 0, 1]
    assert len({one.name for one in met}) == 1
    for one in met:
        assert [said["n"] for said in one.published()] == [1, 2, 0]


def test_the_same_processes_meet_again_over_the_same_store():
    store = HashStore()
    names = {meet_all(store, [(0, 2), (1, 2)])[0][0].name for _ in range(3)}
    assert len(names) == 3


def test_who_is_missing_is_named_on_all_that_came():
    store = HashStore()
    errors, took = meet_all(store, [(0, 4), (3, 4)], seconds=0.4)
    assert 0.35 < took < at_most(2)
    for error in errors:
        assert isinstance(error, DistTimeoutError)
        assert "2 of 4 ranks have arrived; missing: ranks 1, 2." in str(error)
    # and the one that arrives too late hears it at once
    (late,), took = meet_all(store, [(1, 4)], seconds=30)
    assert isinstance(late, DistTimeoutError) and took < at_most(2)


class Counting(HashStore):
    """Counts each thread's calls, and the keys they ask for."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()
        self.keys = Counter()

    def _count(self, keys=1):
        self.calls[threading.get_ident()] += 1
        self.keys[threading.get_ident()] += keys

    def check(self, keys):
        self._count(len(keys))
        return super().check(keys)

    def get(self, key):
        self._count()
        return super().get(key)

    def multi_get(self, keys):
        self._count(len(keys))
        return super().multi_get(keys)

    def add(self, key, value):
        self._count()
        return super().add(key, value)

    def compare_set(self, *arguments):
        self._count()
        return super().compare_set(*arguments)

    def wait(self, keys, timeout=None):
        self._count(len(keys))
        super().wait(keys, timeout)


def test_the_calls_of_a_rank_do_not_grow_with_the_number_of_ranks():
    size, store = 96, Counting()
    met, _ = meet_all(store, [(rank, size) for rank in range(size)], seconds=60)
    before = store.calls.total()
    assert [said["n"] for said in met[5].published()] == list(range(size))
    assert store.calls.total() == before + 1
    assert sorted(store.keys.values())[-2] < 20 < size < max(store.keys.values()) < size + 20


def test_one_rank_looks_for_the_missing_and_all_name_them():
    size, store = 2000, Counting()
    absent = {3, 700, 1999}
    for rank in range(size - 8):  # they have entered, and will not be there at the end
        if rank not in absent:
            store.set(f"hpcdist/meeting/0/rank/{rank}", "{}")
    waiting = [rank for rank in range(size - 8, size) if rank not in absent]
    errors, _ = meet_all(store, [(rank, size) for rank in waiting], seconds=0.5)
    assert len({str(error).partition(": ")[2] for error in errors}) == 1
    assert "1997 of 2000 ranks have arrived; missing: ranks 3, 700, 1999." in str(errors[0])
    assert sorted(store.keys.values())[-2] < 600, "keys that the others asked for"
    assert max(store.calls.values()) < 600


def test_of_many_missing_the_first_are_named():
    size, store = 5000, Counting()
    errors, _ = meet_all(store, [(0, size)], seconds=0.2)
    assert "only 1 of 5000 ranks have arrived; missing: ranks 1, 2, 3," in str(errors[0])
    assert " 32, ..." in str(errors[0]) and " 33" not in str(errors[0])
    assert max(store.calls.values()) < 400


def test_the_last_rank_has_not_said_that_all_are_there():
    store = HashStore()
    for rank in (0, 1):
        store.set(f"hpcdist/meeting/0/rank/{rank}", "{}")
    (error,), _ = meet_all(store, [(2, 3)], seconds=0.2)
    assert "all 3 ranks have arrived, but the last of them has not said so" in str(error)


@pytest.mark.parametrize(
    ("places", "says"),
    [
        ([(0, 3), (1, 3), (1, 3)], "two processes say they are rank 1"),
        ([(0, 3), (1, 2), (2, 3)], "disagree on the world size"),
        ([(0, 2), (2, 2)], "rank 2 is not one of 2 ranks"),
        ([(0, 2), (-1, 2)], "rank -1 is not one of 2 ranks"),
        ([(1, 2), (0, 0)], "rank 0 is not one of 0 ranks"),
    ],
)
def test_what_cannot_be_is_an_error_on_all(places, says):
    errors, took = meet_all(HashStore(), places, seconds=30)
    assert took < 5
    for error, (rank, size) in zip(errors, places, strict=True):
        wrong = not 0 <= rank < size
        assert type(error) is (ValueError if wrong else DistMismatchError), error
        assert says in str(error)


def test_a_latecomer_is_not_let_in_where_its_place_is_taken():
    """The others have met and gone on: only the second rank 0 can be told."""
    store = HashStore()
    (first,), _ = meet_all(store, [(0, 1)])
    OWN.token = "another"
    with pytest.raises(DistMismatchError, match="two processes say they are rank 0"):
        meeting.hold_roll_call(store, 0, 1, 5, "somewhere")
    with pytest.raises(DistMismatchError, match="disagree on the world size"):
        meeting.hold_roll_call(store, 1, 2, 5, "somewhere")
    assert first.rank == 0


def test_ranks_that_disagree_on_something_else():
    errors, _ = meet_all(HashStore(), [(0, 2), (1, 2)], agree=["cpu:mpi", "cuda:nccl"])
    for error in errors:
        assert isinstance(error, DistMismatchError)
        assert "cpu:mpi" in str(error) and "cuda:nccl" in str(error)


def test_a_store_that_fails_is_told():
    class Broken(HashStore):
        def add(self, key, value):
            raise RuntimeError("disk full")

    with pytest.raises(DistNetworkError, match=r"meeting at x: the store failed: disk full"):
        meeting.hold_roll_call(Broken(), 0, 1, 5, "x")


def test_over_a_store_of_torchs_too():
    torch = pytest.importorskip("torch.distributed")
    met, _ = meet_all(torch.PrefixStore("a", torch.HashStore()), [(0, 2), (1, 2)])
    assert met[1].published()[0]["n"] == 0
    errors, took = meet_all(torch.HashStore(), [(0, 2)], seconds=0.3)
    assert isinstance(errors[0], DistTimeoutError) and took < at_most(2)


def test_two_prefixes_do_not_meet():
    store = HashStore()
    errors, _ = meet_all(PrefixStore("a", store), [(0, 2)], seconds=0.2)
    assert isinstance(errors[0], DistTimeoutError)
    met, _ = meet_all(PrefixStore("b", store), [(0, 2), (1, 2)])
    assert met[0].name == met[1].name
