"""The object codec on bytes that may be anything: an object or a CodecError, cheaply."""

import random
import struct
import time
import tracemalloc

import pytest
from codec_cases import SEED, everything
from hostile import head, payloads, u64

from hpcdist.codec import MAX_DEPTH, CodecError, decode, encode

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]


def harmless(payload, limit):
    """Decode bytes that may be anything: only an object or a CodecError may come, cheaply."""
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    began = time.perf_counter()
    try:
        decode(payload)
    except CodecError:
        pass
    peak = tracemalloc.get_traced_memory()[1] - before
    # An empty set takes 9 bytes here and 216 there; the constant covers messages and caches.
    assert peak < 100 * len(payload) + limit, f"{peak} bytes for a payload of {len(payload)}"
    assert time.perf_counter() - began < 5


@pytest.fixture
def traced():
    decode(encode(everything()))  # fill the caches outside the measurement
    tracemalloc.start()
    yield
    tracemalloc.stop()


def test_no_deeper_than_the_writer_goes():
    """One level more than MAX_DEPTH is refused."""
    deep: list = []
    for _ in range(MAX_DEPTH - 1):
        deep = [deep]
    around, empty = b"l" + u64(1), b"l" + u64(0)
    assert encode(deep) == head() + around * (MAX_DEPTH - 1) + empty
    with pytest.raises(CodecError, match="nested more than 128"):
        decode(head() + around * MAX_DEPTH + empty)


def test_truncation_at_each_byte(traced):
    for obj in everything():
        payload = bytes(encode(obj))
        for cut in range(len(payload) if len(payload) < 800 else 400):
            with pytest.raises(CodecError):
                decode(payload[:cut])


@pytest.mark.filterwarnings("ignore")
def test_mutated_payloads(traced):
    """Random damage: flipped bytes, huge lengths, foreign tags, cut and doubled pieces."""
    rng = random.Random(SEED)
    payloads = [bytes(encode(obj)) for obj in everything()]
    payloads = [p for p in payloads if len(p) < 2000]
    tags = b"N10iIfcsbBltdoeEp:rmyanDVZTR&LMndcqYHDZefuPpw"
    lengths = [struct.pack("<Q", n) for n in (0, 1, 255, 2**31, 2**32, 2**62, 2**63, 2**64 - 1)]
    for round_ in range(15_000):
        payload = bytearray(rng.choice(payloads))
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            at = rng.randrange(8, max(9, len(payload)))
            kind = rng.randrange(5)
            if kind == 0:
                payload[at : at + 1] = bytes((rng.randrange(256),))
            elif kind == 1:
                payload[at : at + 8] = rng.choice(lengths)
            elif kind == 2:
                payload[at : at + 1] = rng.choice(tags).to_bytes(1, "little")
            elif kind == 3:
                del payload[at : at + rng.randrange(1, 9)]
            else:
                payload[at:at] = rng.choice(payloads)[8 : 8 + rng.randrange(1, 40)]
        try:
            harmless(bytes(payload), 1 << 17)
        except Exception as exc:
            raise AssertionError(
                f"seed {SEED}, round {round_}, payload {bytes(payload)!r}"
            ) from exc


def test_crafted_payloads(traced, tmp_path, count):
    path = tmp_path / "ran"
    kinds = payloads(str(path))
    for kind, payload in kinds.items():
        with pytest.raises(CodecError):
            obj = decode(payload)
            pytest.fail(f"{kind}: {payload[:100]!r} was taken for {obj!r}")
        harmless(payload, 1 << 17)
    assert not path.exists(), "something was executed"
    count(len(kinds))


def test_nested_keys_cost_no_more_than_their_bytes():
    """References inside keys would let a kilobyte take 2^100 steps to hash."""
    body = b"t" + u64(0)
    for number in range(1, 60):
        body = b"t" + u64(2) + body + b"&" + u64(60 - number)
    with pytest.raises(CodecError, match="leads nowhere"):
        decode(head() + b"e" + u64(1) + body)


@pytest.mark.parametrize("kind", ["dict", "set"])
def test_keys_of_one_hash_do_not_take_their_square(kind):
    """Multiples of 2^61 - 1 all hash to 0: 100,000 of them took a minute to put in a dict."""
    keys = [k * ((1 << 61) - 1) for k in range(1, 4)]
    same = b"".join(
        b"I" + u64(17) + (k * ((1 << 61) - 1)).to_bytes(17, "little", signed=True)
        + (b"N" if kind == "dict" else b"")
        for k in range(1, 100_001)
    )  # fmt: skip
    began = time.perf_counter()
    with pytest.raises(CodecError, match="same hash"):
        decode(head() + (b"d" if kind == "dict" else b"e") + u64(100_000) + same)
    assert time.perf_counter() - began < 5
    few = dict.fromkeys(keys) | {n: None for n in range(5000)} | {str(n): n for n in range(5000)}
    assert decode(encode(few)) == few
    assert decode(encode(set(few))) == set(few)
