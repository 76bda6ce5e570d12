"""TCPStore over a slow network: long values on their way see timeouts and signals."""

from __future__ import annotations

import signal
import socket
import threading
import time
from contextlib import contextmanager, suppress

import pytest
from patience import at_most
from tcp_stores import KEY, master

import hpcdist
from hpcdist.errors import StoreTimeoutError

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]

#: Takes 10 s over the slow network.
LONG = bytes(64 << 20)


def carry(source: socket.socket, sink: socket.socket) -> None:
    """Pass 32 KiB on every 5 ms."""
    try:
        while data := source.recv(32 << 10):
            sink.sendall(data)
            time.sleep(0.005)
    except OSError:
        pass


@contextmanager
def slow_client(port: int):
    """A client of the store at a port, over a network that never stands still."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ends = []

        def serve():
            while True:
                try:
                    one, _ = listener.accept()
                except OSError:
                    return
                two = socket.create_connection(("127.0.0.1", port))
                ends.extend([one, two])
                for way in ((one, two), (two, one)):
                    threading.Thread(target=carry, args=way, daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        near = listener.getsockname()[1]
        try:
            yield hpcdist.TCPStore("127.0.0.1", near, timeout=20, auth_key=KEY)
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            for each in ends:
                with each, suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)


def calls(store):
    return {
        "set": lambda: store.set("k", LONG),
        "get": lambda: store.get("long"),
        "multi_get": lambda: store.multi_get(["short", "long"]),
    }


@pytest.mark.parametrize("how", ["set", "get", "multi_get"])
def test_a_value_that_takes_too_long(how):
    server = master()
    server.multi_set(["short", "long"], ["v", LONG])
    with slow_client(server.port) as store:
        store.set_timeout(0.3)
        began = time.monotonic()
        with pytest.raises(StoreTimeoutError, match="timeout after 300ms.*network is slow"):
            calls(store)[how]()
        assert 0.28 < time.monotonic() - began < at_most(1.3)
        store.set_timeout(20)
        assert store.get("short") == b"v"  # over a new connection
    assert not server.check(["k"])  # half a value is none


@pytest.mark.parametrize("how", ["set", "get"])
def test_a_signal_while_a_value_is_on_its_way(how):
    server = master()
    server.multi_set(["short", "long"], ["v", LONG])

    def interrupt(*_):
        raise KeyboardInterrupt

    with slow_client(server.port) as store:
        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            began = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                calls(store)[how]()
        finally:
            signal.signal(signal.SIGALRM, before)
        assert time.monotonic() - began < at_most(1.3)
        assert store.get("short") == b"v"


def test_a_new_connection_is_part_of_the_timeout():
    """The server then waits for as much less, so that its answer is there in time."""
    server = master()
    store = hpcdist.TCPStore("127.0.0.1", server.port, timeout=1, auth_key=KEY)
    peer, asked = store._peer, []
    links, connect = peer.links, peer._connect

    class Watched:
        keep = links.keep

        def ask(self, op, items, number, wait_ns, seconds):
            asked.append((wait_ns / 1e9, seconds))
            return links.ask(op, items, number, wait_ns, seconds) if len(asked) > 1 else None

    def slow(deadline, patient):
        time.sleep(0.4)
        return connect(deadline, patient)

    peer.links, peer._connect = Watched(), slow
    with pytest.raises(StoreTimeoutError, match="keys: never"):
        store.get("never")
    (first, second), (first_left, second_left) = zip(*asked, strict=True)
    assert 0.9 < first <= 1 and second <= 0.6 and second_left <= first_left - 0.4
