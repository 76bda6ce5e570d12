"""TCPStore: where it listens, and what happens when a server or a client dies or stops."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from datetime import timedelta

import pytest
from patience import at_most
from ports import free_port
from tcp_stores import KEY, SERVER, client, master, program, remote, states, stats, until

import hpcdist
from hpcdist import DistNetworkError, DistStoreError
from hpcdist.errors import StoreTimeoutError
from hpcdist.store._common import Deadline

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]

# --- beginning ---------------------------------------------------------------------------------


def test_a_port_in_use_is_named_at_once():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        began = time.monotonic()
        with pytest.raises(DistNetworkError, match=f"port: {port}, EADDRINUSE.*Another process"):
            master(port=port)
        assert time.monotonic() - began < at_most(2)


def test_it_binds_what_it_was_given_and_nothing_else():
    store = master("127.0.0.2")
    # on 127.0.0.1 another program may have the same port
    for host, free in (("127.0.0.2", False), ("127.0.0.3", True), ("127.0.0.4", True)):
        with socket.socket() as probe:
            assert (probe.connect_ex((host, store.port)) != 0) == free
    wild = master("0.0.0.0")
    wild.set("k", "v")
    for host in ("127.0.0.1", "127.0.0.9"):
        assert hpcdist.TCPStore(host, wild.port, timeout=20, auth_key=KEY).get("k") == b"v"
    with pytest.raises(DistNetworkError, match="192.0.2.1 is not an address of this machine"):
        master("192.0.2.1")


@pytest.mark.parametrize("host", ["::1", "localhost"])
def test_ipv6_and_names(host):
    store = master(host)
    store.set("k", "v")
    assert client(store).get("k") == b"v"
    if host == "::1":
        assert str(store._peer) == f"TCPStore at [::1]:{store.port}"
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", store.port)) != 0


def test_a_host_that_nobody_knows():
    with pytest.raises((DistNetworkError, StoreTimeoutError), match="no-such-host.invalid"):
        hpcdist.TCPStore("no-such-host.invalid", 1, timeout=3, auth_key=KEY)


@pytest.mark.parametrize("host", ["node1..cluster", 70 * "n"])
def test_a_host_that_cannot_be(host):
    with pytest.raises(DistNetworkError, match=f"the host {host} is not known"):
        hpcdist.TCPStore(host, 9, timeout=0.5)


def test_addresses_are_never_turned_into_names(monkeypatch):
    for name in ("getnameinfo", "gethostbyaddr", "getfqdn"):
        monkeypatch.setattr(socket, name, None)
    store = master()
    client(store).set("k", "v")
    assert store.get("k") == b"v"


def test_a_listening_socket_of_the_caller():
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        port = own.getsockname()[1]
        store = master(port=port, master_listen_fd=own.fileno())
        assert store.port == port
        store.set("k", "v")
        assert client(store).get("k") == b"v"
        with pytest.raises(DistNetworkError, match=f"bound to port {port}"):
            master(port=port + 1, master_listen_fd=own.fileno())
    assert client(store).get("k") == b"v"  # the caller has closed its own
    with open(os.devnull) as file, pytest.raises(DistNetworkError, match="master_listen_fd"):
        master(master_listen_fd=file.fileno())


def test_one_server_for_several_masters():
    store = master(multi_tenant=True)
    twin = master(port=store.port, multi_tenant=True)
    twin.set("k", "v")
    assert store.get("k") == b"v"
    del store
    assert twin.get("k") == b"v"
    with pytest.raises(DistNetworkError, match="EADDRINUSE"):
        master(port=twin.port)
    port = twin.port
    del twin
    assert not master(port=port, multi_tenant=True).check(["k"])  # a new server


@pytest.mark.parametrize(
    "arguments, text",
    [
        (("", 1), "host_name"), (("h", 70000), "65535"), (("h", -1), "65535"),
        (("h", 0), "only on"), (("h", 1, 0), "TCPStore world size cannot be 0"),
    ],
)  # fmt: skip
def test_senseless_arguments(arguments, text):
    with pytest.raises(ValueError, match=text):
        hpcdist.TCPStore(*arguments, auth_key=KEY)


def test_waiting_for_workers():
    began = time.monotonic()
    with pytest.raises(StoreTimeoutError, match=r"Timed out after 0.2 seconds .* 1/2 clients"):
        master(size=2, timeout=timedelta(milliseconds=200))
    assert 0.15 < time.monotonic() - began < at_most(0.8)
    port = free_port()
    made = []

    def worker():
        time.sleep(0.1)
        made.append(hpcdist.TCPStore("127.0.0.1", port, 2, False, timeout=20, auth_key=KEY))

    thread = threading.Thread(target=worker)
    thread.start()
    store = master(port=port, size=2)
    thread.join()
    assert made and stats(store)["joined"] == 2
    with pytest.raises(DistStoreError, match="says world_size=3, the master said 2"):
        hpcdist.TCPStore("127.0.0.1", port, 3, False, timeout=20, auth_key=KEY)
    master(size=5, wait_for_workers=False)


def test_a_client_waits_for_its_server():
    port = free_port()
    found = []
    thread = threading.Thread(
        target=lambda: found.append(
            hpcdist.TCPStore("127.0.0.1", port, timeout=20, auth_key=KEY).get("k")
        )
    )
    thread.start()
    time.sleep(0.1)
    store = master(port=port)
    store.set("k", "v")
    thread.join()
    assert found == [b"v"]
    del store
    began = time.monotonic()
    with pytest.raises(StoreTimeoutError, match="no connection within 300ms: Connection refused"):
        hpcdist.TCPStore("127.0.0.1", port, timeout=0.3, auth_key=KEY)
    assert 0.28 < time.monotonic() - began < at_most(0.8)


# --- servers that die or stop ------------------------------------------------------------------


@pytest.mark.parametrize("how", ["get", "set", "add", "wait"])
def test_a_frozen_server(how):
    with remote() as (child, store):
        store.set_timeout(timedelta(milliseconds=400))
        child.send_signal(signal.SIGSTOP)
        until(lambda: states(child.pid) == {"T"})
        began = time.monotonic()
        with pytest.raises(
            StoreTimeoutError, match=r"timeout after 400ms, keys: k .*127.0.0.1.*stop"
        ):
            {
                "get": lambda: store.get("k"),
                "set": lambda: store.set("k", "v"),
                "add": lambda: store.add("k", 1),
                "wait": lambda: store.wait(["k"]),
            }[how]()
        assert 0.35 < time.monotonic() - began < at_most(0.95)
        child.send_signal(signal.SIGCONT)
        store.set_timeout(20)
        assert store.get("here") == b"1"  # with a new connection


def test_a_dead_server():
    with remote() as (child, store):
        twin = store.clone()
        problem = []

        def wait():
            try:
                twin.get("never")
            except DistStoreError as error:
                problem.append((time.monotonic(), str(error)))

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.1)
        began = time.monotonic()
        child.kill()
        thread.join(10)
        assert problem and problem[0][0] - began < at_most(2)
        assert "is gone" in problem[0][1] and "never" in problem[0][1]
        assert f"127.0.0.1:{store.port}" in problem[0][1]
        for _ in range(2):
            began = time.monotonic()
            with pytest.raises(DistStoreError, match="is gone"):
                store.set("k", "v")
            assert time.monotonic() - began < at_most(2)


def test_another_server_at_the_same_address():
    """It does not have the keys: it must not answer in place of the first."""
    store = master()
    store.set("k", "v")
    other = client(store)
    port = store.port
    del store
    again = master(port=port)
    for _ in range(3):
        with pytest.raises(DistStoreError, match="is gone"):
            other.set("k", "v")
    assert again.num_keys() == 0


def test_children_do_not_keep_a_dead_server_s_sockets_open():
    text = (
        SERVER.replace("sys.stdin.read()", "")
        + """
    import os, time
    if os.fork() == 0:
        sys.stdout.close()
        time.sleep(20)
        os._exit(0)
    sys.stdin.read()
    """
    )
    with program(text) as child:
        store = hpcdist.TCPStore(
            "127.0.0.1", int(child.stdout.readline()), timeout=20, auth_key=KEY
        )
        assert store.get("here") == b"1"
        time.sleep(0.3)
        child.kill()
        child.wait()
        began = time.monotonic()
        with pytest.raises(DistStoreError, match="is gone"):
            store.get("here")
        assert time.monotonic() - began < at_most(3)


# --- clients in threads, children, and under signals -------------------------------------------


def test_a_child_of_fork_has_a_connection_of_its_own():
    store = master()
    store.set("k", "v")
    other = client(store)
    pid = os.fork()
    if pid == 0:
        try:
            good = store.get("k") == b"v" and other.add("n", 1) == 1
            os._exit(5 if good else 6)
        except BaseException:
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
    assert other.add("n", 1) == 2 and store.get("k") == b"v"


def test_a_value_goes_to_one_of_many_who_pop():
    store = master()
    got = []

    def take():
        got.extend(store.queue_pop("q") for _ in range(50))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(200):
        store.queue_push("q", str(number))
    for thread in threads:
        thread.join(20)
    assert sorted(map(int, got)) == list(range(200))


def test_ctrl_c():
    text = """
        import sys, time, hpcdist
        store = hpcdist.TCPStore("127.0.0.1", int(sys.argv[1]), timeout=60)
        print("ready", flush=True)
        try:
            store.get("never")
        except KeyboardInterrupt:
            store.set("interrupted", "1")
            print("done", flush=True)
    """
    store = master()
    with program(text, store.port) as child:
        assert child.stdout.readline() == "ready\n"
        time.sleep(0.3)
        began = time.monotonic()
        child.send_signal(signal.SIGINT)
        assert child.stdout.readline() == "done\n"
        assert time.monotonic() - began < at_most(2)
        assert store.get("interrupted") == b"1"


def test_it_answers_while_python_computes():
    """The server needs no GIL: its process may run pure Python as long as it likes."""
    # until the test's process is gone, if it cannot end this one
    busy = "import os; parent = os.getppid()\n    while os.getppid() == parent: pass"
    text = SERVER.replace("sys.stdin.read()", busy)
    with program(text) as child:
        store = hpcdist.TCPStore(
            "127.0.0.1", int(child.stdout.readline()), timeout=20, auth_key=KEY
        )
        times = []
        for _ in range(300):
            began = time.perf_counter()
            store.get("here")
            times.append(time.perf_counter() - began)
        # A server that needed the GIL would need 5 ms for each, Python's switch interval; what else
        # runs on the machine delays some.
        assert sorted(times)[len(times) // 10] < 0.004


def test_many_clients_at_once():
    """The short form of tests/perf/stores.py."""
    port = free_port()
    made = []

    def work():
        for _ in range(25):
            made.append(hpcdist.TCPStore("127.0.0.1", port, 200, False, timeout=20, auth_key=KEY))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    store = master(port=port, size=200, wait_for_workers=False)
    store._join(200, True, Deadline(20))
    for thread in threads:
        thread.join()
    assert len(made) == 200
    for number, each in enumerate(made):
        each.set(f"k{number}", str(number))
    assert made[3].multi_get([f"k{i}" for i in range(200)]) == [b"%d" % i for i in range(200)]


def test_a_server_and_its_memory_end_with_the_store():
    threads = len(os.listdir("/proc/self/task"))
    files = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        store = master()
        store.set("k", b"x" * 100_000)
        clients = [client(store) for _ in range(3)]
        del store, clients
    until = time.monotonic() + 5  # a thread that has been joined may be listed for a moment more
    while len(os.listdir("/proc/self/task")) > threads and time.monotonic() < until:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/task")) <= threads
    assert len(os.listdir("/proc/self/fd")) <= files
