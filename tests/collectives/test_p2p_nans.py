"""Messages and windows with HPCDIST_NAN_CHECK: each end that looks raises, and none is lost."""

from __future__ import annotations

import re

import pytest
import torch
from cases import Check, here, ring
from nans import NAN, error_of
from worlds import works

import hpcdist as dist
from hpcdist import _engine

pytestmark = pytest.mark.ranks


@pytest.fixture(autouse=True)
def looking():
    """Look for NaNs on this rank, as with HPCDIST_NAN_CHECK=1."""
    _engine.look_for_nans(True)
    yield
    _engine.look_for_nans(False)


@pytest.mark.parametrize("n", [3, 100_000])
@pytest.mark.mpi(min_size=2)
def test_messages_keep_their_places(n):
    """Both ends raise at the second of three; the third arrives in its own place."""
    check, (*_, before, after) = Check(), ring()
    sent = [torch.full((n,), float(k)) for k in range(3)]
    sent[1][n - 1] = NAN
    for blocking in (False, True):
        got = [torch.zeros(n) for _ in range(3)]
        receives = [dist.irecv(x, before) for x in got]
        if blocking:
            sends = [error_of(lambda x=x: dist.send(x, after)) for x in sent]
        else:
            begun = [dist.isend(x, after) for x in sent]
            sends = [error_of(lambda w=w: w) for w in begun]
        receives = [error_of(lambda w=w: w) for w in receives]
        for errors, text in (
            (sends, f"NaN at element {n - 1} of {n} in i?send.* to rank {after}.*sent as it is"),
            (receives, f"NaN at element {n - 1} of {n} in irecv.* from rank {before}"),
        ):
            check.that(errors[0] is None and errors[2] is None, f"{errors}")
            check.that(isinstance(errors[1], dist.DistNaNError), f"{errors}")
            check.that(
                bool(re.search(text, str(errors[1]))) and "test_p2p_nans.py:" in str(errors[1]),
                f"{errors[1]}",
            )
        for x, y in zip(sent, got, strict=True):
            check.that(torch.equal(x.nan_to_num(-1), y.nan_to_num(-1)), f"{y}")
    check.done()


@pytest.mark.mpi(min_size=2)
def test_one_end_looks():
    check, (rank, _) = Check(), here()
    for sender_looks in (False, True):
        _engine.look_for_nans((rank == 0) == sender_looks)
        x = torch.tensor([1.0, NAN if rank == 0 else 0.0])
        error = None
        if rank == 0:
            error = error_of(lambda x=x: dist.send(x, 1))
        elif rank == 1:
            error = error_of(lambda x=x: dist.recv(x))
            check.that(x[0].item() == 1.0 and bool(x[1].isnan()), f"{x}")
        looks = rank == (0 if sender_looks else 1)
        check.that(isinstance(error, dist.DistNaNError) if looks else error is None, f"{error}")
    check.done()


def test_batches_and_messages_to_oneself():
    check, (rank, _, before, after) = Check(), ring()
    out, into = torch.tensor([NAN, 2.0]), torch.zeros(2)
    works_ = dist.batch_isend_irecv(
        [dist.P2POp(dist.irecv, into, before), dist.P2POp(dist.isend, out, after)]
    )
    errors = [error_of(lambda w=w: w) for w in works_]
    check.that(all(isinstance(e, dist.DistNaNError) for e in errors), f"{errors}")
    check.that(bool(into[0].isnan()) and into[1].item() == 2.0, f"{into}")
    own = torch.zeros(2)
    works_ = [dist.irecv(own, rank), dist.isend(out, rank)]
    errors = [error_of(lambda w=w: w) for w in works_]
    check.that(all(isinstance(e, dist.DistNaNError) for e in errors), f"{errors}")
    check.that(works(), "afterwards")
    check.done()


def test_windows_write_nothing():
    check, (*_, after) = Check(), ring()
    memory = dist.full((4,), 1.0, symmetric=True)
    window = dist.group.WORLD.new_window()
    window.tensor_register(memory)
    given = torch.tensor([2.0, NAN])
    for call in (window.put, window.accumulate):
        error = error_of(lambda call=call: call(given, after, 1))
        wrong = f"{type(error).__name__}: {error}"
        check.that(isinstance(error, dist.DistNaNError), wrong)
        check.that("NaN at element 1 of 2 in" in wrong and "test_p2p_nans.py" in wrong, wrong)
    dist.barrier()
    check.that(memory.tolist() == [1.0] * 4, f"{memory}")
    dist.barrier()
    window.put(torch.tensor([5.0]), after, 1)
    dist.barrier()
    check.that(memory.tolist() == [1.0, 5.0, 1.0, 1.0], f"{memory}")
    window.tensor_deregister()
    check.done()
