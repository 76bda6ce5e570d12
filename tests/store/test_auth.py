"""TCPStore: who may speak to it, and what the server lets nobody do."""

from __future__ import annotations

import hashlib
import os
import socket
import struct
import threading
import time

import pytest
from patience import at_most
from store_wire import Wire
from tcp_stores import KEY, client, master, program, stats, until

import hpcdist
from hpcdist import DistStoreError, _store
from hpcdist.errors import StoreTimeoutError
from hpcdist.store import auth, new_key

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]

# --- the code of the messages ------------------------------------------------------------------


def test_the_mac_is_blake2b(rng):
    for size in [0, 1, 127, 128, 129, 255, 256, 257, *rng.integers(0, 3000, 150)]:
        data = bytes(rng.integers(0, 256, int(size), "u1"))
        key = bytes(rng.integers(0, 256, int(rng.integers(0, 65)), "u1"))
        out = int(rng.integers(1, 65))
        split = [int(n) for n in rng.integers(0, 300, 8)]
        right = hashlib.blake2b(data, digest_size=out, key=key).digest()
        assert _store.mac(data, key, out, split) == right
        assert _store.mac(data, key, out) == right


# --- keys --------------------------------------------------------------------------------------


def test_the_wrong_key():
    store = master()
    began = time.monotonic()
    with pytest.raises(DistStoreError, match="does not accept this process's key"):
        client(store, auth_key=new_key())
    assert time.monotonic() - began < at_most(2)
    assert stats(store)["refused"] == 1 and stats(store)["connections"] == 1


def test_where_keys_come_from(tmp_path, monkeypatch):
    path = tmp_path / "folder" / "key"
    monkeypatch.delenv("HPCDIST_STORE_KEY", raising=False)
    monkeypatch.setenv("HPCDIST_STORE_KEY_FILE", str(path))
    key = auth.find_key()
    assert path.stat().st_mode & 0o777 == 0o600 and len(key) == 32
    assert auth.find_key() == key == auth.read_key_file(path)
    store = hpcdist.TCPStore("127.0.0.1", 0, 1, True, timeout=20)  # as with torch, nothing given
    assert client(store, auth_key=key).add("n", 1) == 1
    assert client(store, auth_key=None).add("n", 1) == 2
    monkeypatch.setenv("HPCDIST_STORE_KEY", KEY.hex())
    assert auth.find_key() == KEY
    assert auth.find_key(key) == key == auth.find_key(key.hex())
    for wrong in ("12", "x" * 64, KEY.hex() + "00"):
        monkeypatch.setenv("HPCDIST_STORE_KEY", wrong)
        with pytest.raises(ValueError, match="HPCDIST_STORE_KEY must hold 64") as caught:
            auth.find_key()
        assert wrong not in str(caught.value).replace("64 hex", "")
    with pytest.raises(ValueError, match="32 bytes"):
        auth.find_key(b"short")


def test_a_key_file_that_is_not_safe(tmp_path, monkeypatch):
    monkeypatch.delenv("HPCDIST_STORE_KEY", raising=False)
    path = tmp_path / "key"
    monkeypatch.setenv("HPCDIST_STORE_KEY_FILE", str(path))
    path.write_text(KEY.hex())
    path.chmod(0o640)
    with pytest.raises(DistStoreError, match="mode 0640"):
        auth.find_key()
    path.chmod(0o600)
    assert auth.find_key() == KEY
    path.write_text("")
    with pytest.raises(ValueError, match="must hold 64"):
        auth.find_key()
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DistStoreError, match="cannot be read"):
        auth.find_key()
    monkeypatch.setenv("HPCDIST_STORE_KEY_FILE", "/proc/none/key")
    with pytest.raises(DistStoreError, match="HPCDIST_STORE_KEY"):
        auth.find_key()


def test_a_key_file_with_something_else(tmp_path):
    path = tmp_path / "key"
    path.touch(0o600)
    for data in (b"", b"hello\n", b"\xff" * 100, b"00" * 33):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=f"the key file {path} must hold 64 hexadecimal"):
            auth.read_key_file(path)


def test_two_processes_make_one_key_file(tmp_path):
    path = tmp_path / "key"
    text = """
        from hpcdist.store import auth
        input()
        print(auth.find_key().hex(), flush=True)
    """
    env = {"HPCDIST_STORE_KEY": "", "HPCDIST_STORE_KEY_FILE": str(path)}
    with program(text, **env) as one, program(text, **env) as two:
        for child in (one, two):
            child.stdin.write("\n")
            child.stdin.flush()
        assert one.stdout.readline() == two.stdout.readline() != ""


# --- what the server lets nobody do ------------------------------------------------------------


def test_it_speaks_as_written_down():
    """The protocol, from the description in hd_wire.h."""
    store = master()
    wire = Wire(store.port, KEY)
    assert wire.call(1, [b"k", b"v"])[0] == 0
    assert store.get("k") == b"v"
    status, _, items = wire.call(2, [b"k"])
    assert (status, items) == (0, [b"v"])
    status, number, items = wire.call(2, [b"k", b"none"], wait_ns=1)
    assert (status, number, items) == (1, 1, [b"none"])


def test_recorded_traffic_is_of_no_use():
    store = master()
    wire = Wire(store.port, KEY)
    sent = wire.frame(3, [b"n"], number=1)
    wire.send(sent)
    assert wire.reply()[1] == 1
    wire.send(sent)  # again in the same connection
    assert wire.closed()
    other = Wire(store.port, KEY)
    other.send(sent)  # and in another
    assert other.closed()
    replayed = Wire(store.port, KEY, begin=False)
    replayed.send(wire.answer)  # a recorded handshake
    assert replayed.receive(8)[:6] == b"hpcdNo" and replayed.closed()
    assert store.get("n") == b"1"


def test_a_changed_message_is_not_read(rng):
    store = master()
    for _ in range(40):
        wire = Wire(store.port, KEY)
        frame = bytearray(wire.frame(1, [b"key", b"v" * int(rng.integers(0, 60))]))
        frame[int(rng.integers(len(frame)))] ^= 1 << int(rng.integers(8))
        wire.send(bytes(frame))
        wire.finish()
        assert wire.closed()
    assert store.num_keys() == 0


def test_requests_without_sense_with_the_right_key(rng):
    """Who has the key can send nonsense: it is answered, or the connection ends; nothing else."""
    store = master()
    store.set("k", "v")
    wire = Wire(store.port, KEY)
    for _ in range(1500):
        op = int(rng.integers(0, 20))
        items = [bytes(rng.integers(0, 256, int(rng.integers(0, 9)), "u1"))
                 for _ in range(int(rng.integers(0, 5)))]  # fmt: skip
        number = int(rng.choice([0, 1, -1, 2**63 - 1, -(2**63), int(rng.integers(0, 9))]))
        kwargs = {"number": number, "wait_ns": int(rng.choice([0, 1, -5, 1000]))}
        if rng.random() < 0.3:
            kwargs["count"] = int(rng.choice([0, 1, 7, 2**32 - 1]))
        if rng.random() < 0.3:
            kwargs["body"] = bytes(rng.integers(0, 256, int(rng.integers(0, 50)), "u1"))
        if op == 16:
            continue  # waits for processes
        try:
            wire.send(wire.frame(op, items, **kwargs))
            wire.reply()
        except ConnectionError:
            wire = Wire(store.port, KEY)
    assert store.add("alive", 1) == 1


def test_an_announced_length_reserves_nothing():
    store = master()
    before = memory()
    wires = [Wire(store.port, KEY) for _ in range(20)]
    for wire, size in zip(wires, [2**30 - 2**20, 2**40, 2**61, 2**63, 2**64 - 1] * 4, strict=True):
        wire.send(struct.pack("<QIIIIqq", size, 1, 2, 1, 0, 0, 0) + b"x" * 1000)
    store.set("k", "v")
    assert store.get("k") == b"v"
    assert memory() - before < 32 << 20


def memory():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmRSS"))


def test_the_limit(monkeypatch):
    monkeypatch.setenv("HPCDIST_STORE_LIMIT", "1M")
    store = master()
    store.set("k", b"x" * 900_000)
    for call in (
        lambda: store.set("l", b"y" * 200_000),
        lambda: store.set("m", b"y" * 5_000_000),
        lambda: store.append("k", b"y" * 200_000),
        lambda: store.queue_push("q", b"y" * 200_000),
        lambda: store.multi_set(["l", "m"], [b"y" * 100_000, b"z" * 100_000]),
        lambda: store.compare_set("l", "", b"y" * 200_000),
    ):
        with pytest.raises(DistStoreError, match="full.*1048576 bytes.*HPCDIST_STORE_LIMIT"):
            call()
    assert store.list_keys() == ["k"] and store.queue_len("q") == 0
    store.set("k", b"x" * 950_000)  # in place of the old value
    assert store.get("k") == b"x" * 950_000
    store.delete_key("k")
    store.set("l", b"y" * 900_000)
    with pytest.raises(DistStoreError, match="full"):
        for i in range(10_000):
            store.set(f"small{i}", b"")
    assert stats(store)["bytes"] <= 1 << 20


def test_long_values(rng):
    """Above 8 MiB torch's server breaks the connection, after set has said that it is done."""
    store = master()
    value = bytes(rng.integers(0, 256, 24 << 20, "u1"))
    store.set("long", value)
    other = client(store)
    assert other.get("long") == value
    other.append("long", b"end")
    assert store.multi_get(["long", "long"]) == [value + b"end"] * 2
    store.queue_push("q", value)
    assert other.queue_pop("q") == value
    key = "k" * 100_000
    store.set(key, "v")
    assert other.get(key) == b"v" and key in other.list_keys()


def test_slow_and_silent_connections_are_dropped(monkeypatch):
    monkeypatch.setattr("hpcdist.store.tcp._HANDSHAKE", 0.3)
    monkeypatch.setattr("hpcdist.store.tcp._MESSAGE", 0.3)
    store = master()
    silent = Wire(store.port, KEY, begin=False)
    slow = Wire(store.port, KEY, begin=False)
    slow.send(slow.answer[:20])
    half = Wire(store.port, KEY)
    half.send(half.frame(1, [b"k", b"v" * 1000])[:500])
    deaf = Wire(store.port, KEY)
    store.set("long", b"x" * (32 << 20))
    deaf.send(deaf.frame(2, [b"long"]))
    for wire in (silent, slow, half):
        assert wire.closed(within=5)
    # 32 s for 32 MiB: too long for a test; it is there, and disturbs nobody
    began = time.monotonic()
    store.get("long")
    assert time.monotonic() - began < 5
    deaf.close()
    until(lambda: stats(store)["connections"] <= 2 and stats(store)["strangers"] == 0)


def test_idle_connections(monkeypatch):
    monkeypatch.setenv("HPCDIST_STORE_IDLE", "0.2")
    monkeypatch.setattr("hpcdist.store._peer._FRESH_NS", 0)
    store = master()
    store.set("k", "v")
    until(lambda: stats(store)["connections"] == 0)
    assert store.get("k") == b"v"  # connects again by itself


def test_idle_connections_that_are_closed_at_once(monkeypatch):
    """A client does not look at one that it has just used: its server was gone, it said."""
    monkeypatch.setenv("HPCDIST_STORE_IDLE", "0.1")
    store = master()
    store.set("k", "v")
    time.sleep(0.5)
    assert store.get("k") == b"v"


def test_too_many_connections(monkeypatch):
    monkeypatch.setenv("HPCDIST_STORE_CONNECTIONS", "3")
    store = master()
    others = [client(store) for _ in range(2)]
    with pytest.raises(StoreTimeoutError, match="as many connections as it may"):
        client(store, timeout=0.2)
    del others[0]
    client(store).set("k", "v")


def test_strangers_do_not_keep_the_others_out(monkeypatch):
    """The short form of tests/perf/stores.py: garbage and slow connections beside a client."""
    monkeypatch.setattr("hpcdist.store.tcp._STRANGERS", 50)
    store = master()
    store.set("k", "v")
    before = memory()
    slow = [Wire(store.port, KEY, begin=False) for _ in range(60)]
    for wire in slow:
        wire.send(b"h")
    worst = 0.0
    for number in range(400):
        with socket.create_connection(("127.0.0.1", store.port)) as garbage:
            garbage.sendall(os.urandom(200 if number % 2 else 72))
        began = time.monotonic()
        assert store.get("k") == b"v"
        worst = max(worst, time.monotonic() - began)
    assert stats(store)["strangers"] <= 51 and stats(store)["dropped"] > 0
    assert memory() - before < 16 << 20
    assert client(store).get("k") == b"v"
    assert worst < 1.0


def test_strangers_take_all_descriptors():
    """Hundreds that say nothing to a server with 128 descriptors: a client behind them comes in."""
    text = """
        import resource, sys, hpcdist
        store = hpcdist.TCPStore("127.0.0.1", 0, None, True, timeout=30)
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
        print(store.port, flush=True)
        sys.stdin.read()
    """
    with program(text) as child:
        port = int(child.stdout.readline())
        strangers = [socket.socket() for _ in range(400)]
        for each in strangers:
            each.setblocking(False)
            each.connect_ex(("127.0.0.1", port))
        began = time.monotonic()
        store = hpcdist.TCPStore("127.0.0.1", port, timeout=20, auth_key=KEY)
        store.set("k", "v")
        assert store.get("k") == b"v"
        spent = time.monotonic() - began
        for each in strangers:
            each.close()
    assert spent < at_most(3.0), f"{spent:.1f} s"


def test_a_large_multi_get_does_not_block_others():
    """Values of 4 KiB and more are sent from where they lie, in turns with other clients."""
    store = master()
    keys, value = [str(n) for n in range(40_000)], b"x" * 4096
    for at in range(0, len(keys), 4000):
        store.multi_set(keys[at : at + 4000], [value] * 4000)
    reader, other = client(store), client(store)
    got = []
    thread = threading.Thread(target=lambda: got.extend(reader.multi_get(keys)))
    thread.start()
    worst = 0.0
    while thread.is_alive():
        began = time.monotonic()
        other.add("n", 1)
        worst = max(worst, time.monotonic() - began)
        time.sleep(0.001)
    thread.join()
    assert got == [value] * len(keys)
    assert worst < 1.0, f"another client waited for {worst:.2f} s"


def test_a_foreign_server():
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        port = foreign.getsockname()[1]
        with pytest.raises(StoreTimeoutError, match="says nothing"):
            hpcdist.TCPStore("127.0.0.1", port, timeout=0.3, auth_key=KEY)
        foreign.accept()[0].close()

        def answer():
            connection = foreign.accept()[0]
            connection.sendall(b"SSH-2.0-OpenSSH_9.2p1\r\n" + bytes(200))
            connection.shutdown(socket.SHUT_WR)
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(DistStoreError, match="no hpcdist store"):
            hpcdist.TCPStore("127.0.0.1", port, timeout=5, auth_key=KEY)
        thread.join()

        def imitate():
            connection = foreign.accept()[0]
            connection.sendall(b"hpcdSt\0\1" + bytes(32))
            connection.recv(72, socket.MSG_WAITALL)
            connection.sendall(b"hpcdSt\0\1" + bytes(16 + 32))
            connection.recv(1)
            connection.close()

        thread = threading.Thread(target=imitate)
        thread.start()
        with pytest.raises(DistStoreError, match="cannot prove"):
            hpcdist.TCPStore("127.0.0.1", port, timeout=5, auth_key=KEY)
        thread.join()
