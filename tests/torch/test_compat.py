"""The bridge's methods as every version of torch calls them, without ranks.

What they do is tested over MPI, with the torch that is installed; here stand-ins take the calls.
"""

from __future__ import annotations

import gc
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as td

import hpcdist.torch
from hpcdist._buffer import limit as call_limit
from hpcdist._torch_version import version
from hpcdist.groups import sparse
from hpcdist.groups.hooks import Hooks
from hpcdist.groups.members import Members
from hpcdist.torch import compat
from hpcdist.torch.process_group import BridgeGroup

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]


class FakeWork:
    def wait(self, timeout=None):
        return True

    def is_completed(self):
        return True


class FakeComm:
    """Takes down which operation was called, and with what."""

    rank, size, seq, freed = 0, 2, 41, False

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.timeout = 9.0

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*arguments, **_):
            self.calls.append((name, arguments))
            self.limit = call_limit() or self.timeout
            return FakeWork()

        return call


class FakeGroup:
    name, group_desc, members = "fake", "a stand-in", Members((0, 1), "fake")
    _backends: dict[str, object] = {}

    def __init__(self) -> None:
        self.carrier = FakeComm()
        self.hooks = Hooks()

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self.carrier.timeout)

    @timeout.setter
    def timeout(self, value: timedelta) -> None:
        self.carrier.timeout = value.total_seconds()

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


@pytest.fixture
def bridge() -> BridgeGroup:
    return BridgeGroup(FakeGroup())


def pair() -> list[torch.Tensor]:
    return [torch.zeros(2), torch.zeros(2)]


#: Name that some torch calls -> its arguments there, and the native operation that must run.
CALLS = {
    "_allgather_base": (lambda: (torch.zeros(4), torch.zeros(2)), "all_gather_into_tensor"),
    "_reduce_scatter_base": (lambda: (torch.zeros(2), torch.zeros(4)), "reduce_scatter_tensor"),
    "allgather_into_tensor_coalesced": (lambda: (pair(), pair()), "all_gather_into_tensor"),
    "reduce_scatter_tensor_coalesced": (lambda: (pair(), pair()), "reduce_scatter_tensor"),
    "alltoall_base": (lambda: (torch.zeros(2), torch.zeros(2), [], []), "all_to_all_single"),
}


@pytest.mark.parametrize("renamed", compat.NAMES, ids=lambda renamed: renamed.other)
def test_every_name_is_the_same_method(bridge: BridgeGroup, renamed: compat.Renamed) -> None:
    own = getattr(BridgeGroup, renamed.ours)
    assert getattr(BridgeGroup, renamed.other) is own
    if renamed.other in CALLS:
        arguments, wanted = CALLS[renamed.other]
        getattr(bridge, renamed.other)(*arguments()).wait()
        assert {name for name, _ in bridge._carrier.calls} == {wanted}


def test_coalescing_under_its_names_before_and_after(bridge: BridgeGroup) -> None:
    for start, end in (
        (bridge._start_coalescing, bridge._end_coalescing),
        (bridge.start_coalescing, bridge.end_coalescing),
    ):
        start(torch.device("cpu"))
        for _ in range(3):
            bridge.allreduce([torch.zeros(2)])
        work = end(torch.device("cpu"))
        assert work.wait(timedelta(seconds=1)) and len(work.result()) == 3


def test_no_method_of_torchs_process_groups_is_left_out() -> None:
    """The rest of its methods ask a backend in C++, which a Python group does not have."""
    inherited = {
        "BackendType", "boxed", "unbox", "name", "rank", "size", "bound_device_id",
        "get_group_store", "_backend_id", "_get_backend_name", "_id",
        # nobody calls these for a group in Python: they set up backends in C++
        "_register_backend", "_set_default_backend", "_register_on_completion_hook",
        "_wait_for_pending_works", "_enable_collectives_timing", "_end_time_estimate",
        "_start_time_estimate", "_set_store", "use_pg_for_symm_mem_rendezvous", "_group_start",
        "_group_end", "_get_sequence_number_for_group",
        # goes to the backends, and is a request that they may ignore
        "_add_ephemeral_timeout",
    }  # fmt: skip
    theirs = {name for name in vars(td.ProcessGroup) if name.strip("_").islower()}
    theirs -= {name for name in theirs if name.startswith(("__", "_pybind"))}
    ours = {
        name
        for part in BridgeGroup.__mro__
        if part.__module__.startswith("hpcdist.")
        for name in vars(part)
    }
    missing = theirs - inherited - ours
    assert missing == set(), f"torch {torch.__version__}: {sorted(missing)}"


def test_names_and_numbers_of_a_group(bridge: BridgeGroup) -> None:
    assert (bridge.getBackendName(), bridge.name()) == ("hpcdist", "hpcdist")
    assert (bridge.rank(), bridge.size()) == (0, 2)
    assert (bridge.group_name, bridge.group_desc) == ("fake", "a stand-in")
    bridge._set_group_name("7")
    bridge._set_group_desc("a pair")
    assert (bridge.group_name, bridge.group_desc) == ("7", "a pair")
    assert bridge._get_sequence_number_for_group() == 41
    bridge._set_default_timeout(timedelta(seconds=3))
    assert bridge._carrier.timeout == 3.0
    with pytest.raises(NotImplementedError, match="do not grow"):
        bridge.merge_remote_group(None, 4, timedelta(seconds=1))
    assert bridge.split_group([1]) is None


def test_what_a_group_cannot_do_is_refused_in_words(bridge: BridgeGroup) -> None:
    with pytest.raises(NotImplementedError, match="of the backend 'hpcdist' call no hooks when"):
        bridge._register_on_completion_hook(print)


def test_abort_hooks_run_once_before_a_group_is_freed(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[str] = []
    made = BridgeGroup(FakeGroup(), lambda: calls.append("freed"))

    def wrong() -> None:
        calls.append("wrong")
        raise RuntimeError("too bad")

    hooks = {5: wrong, 1: lambda: calls.append("one"), 2: lambda: calls.append("two")}
    for number, hook in hooks.items():
        made.register_abort_hook(number, hook)
    for number, refused, kind in ((5, print, ValueError), (9, "no function", TypeError)):
        with pytest.raises(kind):
            made.register_abort_hook(number, refused)
    made.unregister_abort_hook(2)
    made.unregister_abort_hook(77)
    made.abort()
    made.abort()
    assert calls == ["wrong", "one", "freed"] and made.supports_abort_hooks
    assert "abort hook 5 of group 'fake' raised" in caplog.text and "too bad" in caplog.text


@pytest.mark.skipif(version() < (2, 14), reason="torch makes no backend in Python")
def test_torchs_parts_in_c_find_a_default_backend(bridge: BridgeGroup) -> None:
    from torch._C import _distributed_c10d as c10d

    if hasattr(c10d, "FlightRecorderHook"):  # torch 2.15 attaches it to every group
        ranks = [[0, 1]] if version() >= (2, 15) else []
        c10d.FlightRecorderHook.attach(bridge, *ranks).remove()
    own = bridge._delegate
    assert (own.rank(), own.size(), own.name()) == (0, 2, "hpcdist")
    own.allreduce_sparse([torch.zeros(2)], td.AllreduceOptions())
    assert bridge._carrier.calls[-1][0] == "all_reduce"
    assert own._get_sequence_number_for_group() == 41


def test_a_sparse_tensor_has_the_timeout_of_its_call(bridge: BridgeGroup, monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(sparse, "all_reduce", lambda *_: seen.append(call_limit()))
    tensor = torch.ones(3).to_sparse()
    bridge.allreduce([tensor], timeout=timedelta(seconds=5)).wait()
    assert bridge.allreduce([tensor]).result()[0] is tensor
    assert seen == [5.0, 0.0]


def test_a_group_and_its_delegate_end_together() -> None:
    made = BridgeGroup(FakeGroup())
    both = [weakref.ref(each) for each in (made, made._delegate) if each is not None]
    del made
    gc.collect()
    assert [each() for each in both] == [None] * len(both)


def test_a_gather_into_one_tensor_takes_it_apart(bridge: BridgeGroup) -> None:
    together = torch.zeros(2, 3)
    bridge.gather_into_tensor(together, torch.zeros(3))
    name, (own, parts, root, *_) = bridge._carrier.calls[-1]
    assert (name, own.shape, root) == ("gather", (3,), 0)
    assert [part.data_ptr() for part in parts] == [row.data_ptr() for row in together]
    with pytest.raises(ValueError, match="has 5 elements; it must have 2"):
        bridge.gather_single(torch.zeros(5), torch.zeros(3))
    with pytest.raises(ValueError, match="not contiguous"):
        bridge.gather_single(torch.zeros(3, 2).T, torch.zeros(3))


def test_options_without_a_timeout_and_without_a_wish_for_work(bridge: BridgeGroup) -> None:
    options = td.AllreduceOptions()
    assert options.timeout == timedelta(milliseconds=-1)
    options.asyncOp = False
    bridge.allreduce([torch.zeros(2)], options)
    # no handle was asked for, and none made: the last argument would be async_op
    assert bridge._carrier.calls[-1][0] == "all_reduce" and len(bridge._carrier.calls[-1][1]) == 2
    options.reduceOp, options.timeout = td.ReduceOp.MAX, timedelta(seconds=2)
    bridge.allreduce([torch.zeros(2)], options)
    assert bridge._carrier.calls[-1][1][1:] == (hpcdist.ReduceOp.MAX,)
    assert (bridge._carrier.limit, bridge._carrier.timeout) == (2.0, 9.0)


def test_an_old_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    with pytest.raises(ImportError, match=r"needs torch 2\.10 or newer, and this is 2\.9"):
        compat.check()


def test_lists_that_would_be_dropped_are_refused(bridge: BridgeGroup) -> None:
    with pytest.raises(ValueError, match="one list of tensors is expected, not 2"):
        bridge.allgather([pair(), pair()], [torch.zeros(2)])
    with pytest.raises(ValueError, match="one list of tensors is expected, not 2"):
        bridge.reduce_scatter([torch.zeros(2)], [pair(), pair()])
    # nothing was begun, and the other ranks heard why
    assert [name for name, _ in bridge._carrier.calls] == ["refuse", "refuse"]
