"""Signals during a call that waits: handlers run soon, and what they raise is raised."""

import contextlib
import signal
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
from cases import Check, here
from lateness import handled_call, hear, tell_all

import hpcdist as dist
from hpcdist.testing import parallel_assert

pytestmark = [pytest.mark.ranks, pytest.mark.mpi(min_size=2)]

#: Milliseconds after which the signal comes. The engine looks at signals every 50 ms, and the first
#: look is unlike the others: it notes the calling line too.
DELAYS = (5, 20, 40, 60, 300)
#: Calls of the kinds of waits that the engine has: they meet every delay, the others two.
EACH_WAIT = {
    "all_reduce", "all_reduce of a long tensor", "all_reduce and wait", "all_gather_object",
    "backward of DDP",
}  # fmt: skip
#: Seconds until a handler runs, beyond that, in the quickest of a test's calls on a machine that
#: others use too, and in every one of them.
SOON, AT_MOST = 0.5, 5.0
#: How long it took in each call of the running test.
waited: list[float] = []


class Alarm(Exception):
    """What a handler raises."""


@contextlib.contextmanager
def alarm(milliseconds: float, handler: Callable):
    """Have a handler called after a while."""
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, milliseconds / 1e3)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True)
def in_time():
    """After the test: did its handlers run soon?"""
    waited.clear()
    yield
    parallel_assert(min(waited, default=0.0) < SOON, f"{waited}")


@pytest.fixture
def group():
    made = dist.new_group(timeout=timedelta(seconds=20))
    yield made
    dist.destroy_process_group(made)


def tensors() -> list[torch.Tensor]:
    return [torch.ones(3) for _ in range(here()[1])]


def on_first(values: list) -> list | None:
    return values if here()[0] == 0 else None


def backward(group) -> Callable:
    trained = dist.DistributedDataParallel(torch.nn.Linear(3, 2), process_group=group)
    loss = trained(torch.ones(4, 3)).sum()
    return lambda: (loss.backward(), trained)  # kept until then


def ready(call: Callable) -> Callable:
    """Of a call that needs no preparation on all ranks together."""
    return lambda group: lambda: call(torch.ones(3), group)


LONG = torch.ones(99999)
#: Name -> what all ranks prepare together, which returns the call that waits.
CALLS = {
    "all_reduce": ready(lambda t, g: dist.all_reduce(t, group=g)),
    "all_reduce of a long tensor": ready(lambda t, g: dist.all_reduce(LONG, group=g)),
    "all_reduce_coalesced": ready(lambda t, g: dist.all_reduce_coalesced([t, t * 2], group=g)),
    "all_reduce and wait": ready(lambda t, g: dist.all_reduce(t, group=g, async_op=True).wait()),
    "reduce": ready(lambda t, g: dist.reduce(t, 0, group=g)),
    "broadcast": ready(lambda t, g: dist.broadcast(t, 0, group=g)),
    "broadcast and wait": ready(lambda t, g: dist.broadcast(t, 0, group=g, async_op=True).wait()),
    "all_gather": ready(lambda t, g: dist.all_gather(tensors(), t, group=g)),
    "all_gather_into_tensor": ready(
        lambda t, g: dist.all_gather_into_tensor(torch.ones(3 * here()[1]), t, group=g)
    ),
    "gather": ready(lambda t, g: dist.gather(t, on_first(tensors()), 0, group=g)),
    "scatter": ready(lambda t, g: dist.scatter(t, on_first(tensors()), 0, group=g)),
    "reduce_scatter": ready(lambda t, g: dist.reduce_scatter(t, tensors(), group=g)),
    "all_to_all": ready(lambda t, g: dist.all_to_all(tensors(), tensors(), group=g)),
    "barrier": ready(lambda t, g: dist.barrier(group=g)),
    "broadcast_object_list": ready(lambda t, g: dist.broadcast_object_list(["x"], 0, group=g)),
    "all_gather_object": ready(lambda t, g: dist.all_gather_object([0] * here()[1], 1, group=g)),
    "gather_object": ready(lambda t, g: dist.gather_object(1, on_first([0] * here()[1]), 0, g)),
    "scatter_object_list": ready(
        lambda t, g: dist.scatter_object_list([0], on_first([1] * here()[1]), 0, g)
    ),
    "backward of DDP": backward,
}


def interrupted(
    call: Callable, milliseconds: float, raises: bool, then: Callable = lambda: None
) -> str:
    """Make a call that a signal interrupts; what is wrong with how it ends.

    A handler that does not raise does something `then`.
    """
    seen: list[float] = []
    got: BaseException | None = None

    def handler(*_: object) -> None:
        seen.append(time.monotonic())
        if raises:
            raise Alarm
        then()

    began = time.monotonic()
    with alarm(milliseconds, handler):
        try:
            call()
        except Exception as error:
            got = error
    if not seen:
        return f"the handler was not called, and it ended with {got!r}"
    waited.append(seen[0] - began - milliseconds / 1e3)
    if waited[-1] > AT_MOST:
        return f"the handler was called after {seen[0] - began:.3f} s"
    return "" if (type(got) is Alarm if raises else got is None) else f"it ended with {got!r}"


@pytest.mark.deadline(120)
@pytest.mark.parametrize("name", CALLS)
def test_handlers_run_and_what_they_raise_is_raised(group, name, rng):
    """The first rank is interrupted; the others come later, to a call that was given up if so."""
    check, (rank, size) = Check(), here()
    one = int(rng.choice(DELAYS))
    for milliseconds in (20,) if size != 2 else DELAYS if name in EACH_WAIT else (20, one):
        for raises in (True,) if milliseconds in (5, 40, 60) else (False, True):
            call = CALLS[name](group)
            dist.barrier()
            if rank == 0:
                before = group.carrier.seq
                problem = interrupted(call, milliseconds, raises, tell_all)
                for _ in range(20):
                    if not raises or group.carrier.seq > before:
                        break  # else it came before the call had begun
                    problem = interrupted(call, milliseconds, raises)
                if raises:
                    tell_all()
                check.that(not problem, f"{milliseconds} ms, raises {raises}: {problem}")
            else:
                hear(0)
                with contextlib.suppress(dist.DistError) if raises else contextlib.nullcontext():
                    call()
            dist.barrier()
            tensor = torch.ones(2)
            dist.all_reduce(tensor, group=group)
            check.that(tensor.tolist() == [size] * 2, f"{milliseconds} ms: then {tensor}")
    check.done()


def test_what_ctrl_c_raises_in_a_new_group_and_in_a_store():
    check, (rank, _) = Check(), here()
    for milliseconds in (20, 300):
        dist.barrier()
        if rank == 0:
            problem = interrupted(
                lambda: dist.new_group(timeout=timedelta(seconds=20)), milliseconds, True
            )
            check.that(not problem, f"new_group, {milliseconds} ms: {problem}")
            tell_all()
        else:
            hear(0)
            with contextlib.suppress(dist.DistError):
                dist.new_group(timeout=timedelta(seconds=0.5))
        dist.barrier()
    store = dist.TCPStore("localhost", 0, 1, True)
    for milliseconds in DELAYS:
        problem = interrupted(lambda: store.get("never"), milliseconds, True)
        check.that(not problem, f"a store's get, {milliseconds} ms: {problem}")
        problem = interrupted(
            lambda ms=milliseconds: pytest.raises(
                dist.DistStoreError, store.wait, ["never"], timedelta(milliseconds=ms + 100)
            ),
            milliseconds,
            False,
        )
        check.that(not problem, f"a store's wait, {milliseconds} ms: {problem}")
    check.done()


def test_a_handler_calls_what_could_only_begin_after_it(group):
    """On the group that this thread waits in: an error at once. On another group: it runs.

    The other ranks begin the call when the handler has ended.
    """
    check, (rank, size) = Check(), here()
    other = dist.new_group()
    tensor = torch.ones(2)
    wrong = {
        "all_reduce": lambda: dist.all_reduce(torch.ones(2), group=group),
        "wait": lambda: dist.all_reduce(tensor, group=group, async_op=True).wait(),
        "destroy": lambda: dist.destroy_process_group(group),
        "destroy all": dist.destroy_process_group,
    }
    for name, call in wrong.items():
        said: list[str] = []

        def handler(*_: object, call: Callable = call, said: list[str] = said) -> None:
            try:
                call()
            except dist.DistError as error:
                said.append(f"{error}")
            tell_all()

        mine = torch.ones(2)
        dist.barrier()
        if rank == 0:
            with handled_call(group, handler):
                dist.all_reduce(mine, group=group)
            check.that(len(said) == 1 and "signal handler" in said[0], f"{name}: {said}")
        else:
            hear(0)
            dist.all_reduce(mine, group=group)
        check.that(mine.tolist() == [size] * 2, f"{name}: then {mine}")
        if name == "wait":  # what the handler queued is there still, and the others join it
            if rank:
                dist.all_reduce(tensor, group=group, async_op=True).wait()
            dist.barrier(group)
    sums = torch.ones(2), torch.ones(2)
    if rank == 0:
        with alarm(20, lambda *_: dist.all_reduce(sums[1], group=other)):
            dist.all_reduce(sums[0], group=group)
    else:
        dist.all_reduce(sums[1], group=other)
        dist.all_reduce(sums[0], group=group)
    check.that(all(each.tolist() == [size] * 2 for each in sums), f"of both groups: {sums}")
    dist.destroy_process_group(other)
    check.done()


def test_a_handler_that_uses_another_group_is_no_wrong_order():
    """One rank is in group A, and its handler has yet to call group B, where the other waits."""
    check, (rank, size) = Check(), here()
    groups = [dist.new_group(timeout=timedelta(seconds=20)) for _ in range(2)]
    sums = torch.ones(2), torch.ones(2)
    dist.barrier()
    if rank == 0:
        with alarm(500, lambda *_: dist.all_reduce(sums[1], group=groups[1])):
            dist.all_reduce(sums[0], group=groups[0])
    else:
        dist.all_reduce(sums[1], group=groups[1])
        dist.all_reduce(sums[0], group=groups[0])
    check.that(all(each.tolist() == [size] * 2 for each in sums), f"{sums}")
    for each in groups:
        dist.destroy_process_group(each)
    check.done()


def test_destroy_is_over_after_ctrl_c(group):
    """Whatever it waits for, the group is gone, and can be made again."""
    check, (rank, size) = Check(), here()
    for outstanding in (False, True):
        made = dist.new_group(timeout=timedelta(seconds=20))
        dist.barrier()
        if rank == 0:
            if outstanding:
                left = dist.all_reduce(torch.ones(2), group=made, async_op=True)
            problem = interrupted(lambda made=made: dist.destroy_process_group(made), 200, True)
            check.that(not problem, f"outstanding {outstanding}: {problem}")
            tell_all()
            with contextlib.suppress(ValueError):
                dist.destroy_process_group(made)
                check.that(False, "destroyed twice")
            if outstanding:
                with contextlib.suppress(dist.DistError):
                    left.wait()
        else:
            hear(0)
            if outstanding:
                with contextlib.suppress(dist.DistError):
                    dist.all_reduce(torch.ones(2), group=made)
            dist.destroy_process_group(made)
        dist.barrier()
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=group)
    parallel_assert(tensor.tolist() == [size] * 2)
    check.done()


@pytest.mark.deadline(120)
@pytest.mark.parametrize("transport", ["page", "mpi"])
@pytest.mark.parametrize("where", ["queued", "running"])
def test_a_call_that_had_to_queue_is_over_after_a_handler_raised(where, transport, monkeypatch):
    """Its tensors stay as they are, and the other ranks hear of it, as of one that runs at once."""
    if transport == "mpi":
        monkeypatch.setenv("HPCDIST_CHECK_TRANSPORT", "mpi")
    group = dist.new_group(timeout=timedelta(seconds=20))
    check, (rank, size) = Check(), here()
    calls = {
        "all_reduce": lambda t: dist.all_reduce(t, group=group),
        "broadcast": lambda t: dist.broadcast(t, size - 1, group=group),
        "all_gather": lambda t: dist.all_gather_single(t, torch.ones(len(t) // size), group=group),
        "barrier": lambda t: dist.barrier(group),
    }
    for name, call in calls.items():
        first, tensor = torch.ones(4), torch.full((4000 * size,), float(rank + 5))
        dist.barrier()
        if rank == 0:
            work = dist.all_reduce(first, group=group, async_op=True)
            problem = interrupted(lambda call=call, tensor=tensor: call(tensor), 300, True)
            check.that(not problem, f"{name}: {problem}")
            tensor.fill_(1.0)
            tell_all()
        else:
            if where == "queued":
                hear(0)
            work = dist.all_reduce(first, group=group, async_op=True)
            if where == "running":
                work.wait()
                hear(0)
            try:
                call(tensor)
                check.that(False, f"{name}: no error beside a rank that gave up")
            except dist.DistTimeoutError:
                pass
            tensor.fill_(1.0)
        work.wait()
        dist.barrier()
        check.that(bool((tensor == 1).all()), f"{name}: the tensor was written to: {tensor}")
        check.that(first.tolist() == [size] * 4, f"{name}: {first}")
        dist.all_reduce(tensor, group=group)
        check.that(bool((tensor == size).all()), f"{name}: then {tensor}")
    dist.destroy_process_group(group)
    check.done()
