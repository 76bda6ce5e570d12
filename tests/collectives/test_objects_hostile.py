"""Malicious and damaged payloads in every object operation: refused by each receiver, at its own
memory's cost only, and the group goes on."""

import tracemalloc

import pytest
from cases import Check, here
from hostile import payloads

import hpcdist as dist
from hpcdist import codec

pytestmark = [pytest.mark.ranks, pytest.mark.mpi(min_size=2)]

#: Bytes that refusing may take beside a hundred times the payload: messages and caches.
LIMIT = 1 << 20


def every_operation(rank: int, size: int) -> dict:
    """Each operation that moves objects -> the call, and whether rank r receives some of rank 0."""
    return {
        "broadcast_object_list": (lambda: dist.broadcast_object_list([None], 0), lambda r: r > 0),
        "all_gather_object": (lambda: dist.all_gather_object([None] * size, 1), lambda r: True),
        "gather_object": (
            lambda: dist.gather_object(1, [None] * size if rank == 1 else None, 1),
            lambda r: r == 1,
        ),
        "scatter_object_list": (
            lambda: dist.scatter_object_list([None], [1] * size if rank == 0 else None, 0),
            lambda r: True,
        ),
        "send_object_list": (
            lambda: dist.send_object_list([1], 1) if rank == 0 else
            dist.recv_object_list([None], 0) if rank == 1 else None,
            lambda r: r == 1,
        ),
    }  # fmt: skip


def error_and_peak(call) -> tuple[str, int]:
    """The text of the CodecError that a call raises, or of what it raises instead; its memory."""
    text = ""
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    try:
        call()
    except dist.CodecError as error:
        text = str(error)
    except Exception as error:
        text = f"instead {type(error).__name__}: {error}"
    return text, tracemalloc.get_traced_memory()[1] - before


@pytest.mark.filterwarnings("ignore")
def test_hostile_payloads_through_every_operation(tmp_path, monkeypatch, count):
    check, (rank, size) = Check(), here()
    path = tmp_path / "ran"
    held = [None] * size
    # rank 0's file name must not matter to the others: it goes into the payloads' sizes
    dist.all_gather_object(held, str(path))
    kinds = payloads(held[0])
    evil = {}
    honest = codec.encode

    def encode(obj, **keywords):
        return bytearray(evil["payload"]) if evil else honest(obj, **keywords)

    operations = every_operation(rank, size)
    monkeypatch.setattr(codec, "encode", encode)
    tracemalloc.start()
    cases = 0
    names = sorted(kinds)
    for number, kind in enumerate(names):
        payload = kinds[kind]
        # each kind through one operation on few ranks' time, all kinds through all in turn
        for name in (sorted(operations)[number % len(operations)], "broadcast_object_list"):
            call, receives = operations[name]
            evil["payload"] = payload if rank == 0 else bytes(honest(1))
            text, peak = error_and_peak(call)
            evil.clear()
            label = f"{name}, {kind}"
            if receives(rank):
                check.that("from rank 0" in text, f"{label}: {text or 'no error'}")
            else:
                check.that(not text, f"{label}: {text}")
            bound = 100 * len(payload) * size + LIMIT
            check.that(peak < bound, f"{label}: {peak} bytes for {len(payload)}")
            cases += 1
    tracemalloc.stop()
    monkeypatch.undo()
    check.that(not path.exists(), "something was executed")
    dist.barrier()
    count(cases)
    check.done()
