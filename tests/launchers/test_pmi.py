"""PMI-1: what MPI asks its process manager, and what is answered."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading

import pytest

from hpcdist.launchers.pmi import Manager, Server, mapping, node_of_this_process
from hpcdist.launchers.pmi.protocol import parse
from hpcdist.launchers.pmi.server import pid_space
from hpcdist.store import HashStore

pytestmark = pytest.mark.local


class Space:
    def __init__(self):
        self.data = {}
        self.barriers = 0

    def put(self, key, value):
        self.data[key] = value

    def get(self, key):
        return self.data.get(key)

    def barrier(self):
        self.barriers += 1


# MPICH 5.0.2, rank 0 of 2 on two nodes, and what hydra answered; values shortened
RECORDED = """
C: cmd=init pmi_version=1 pmi_subversion=1
S: cmd=response_to_init rc=0 pmi_version=1
C: cmd=get_maxes
S: cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=1024
C: cmd=get_appnum
S: cmd=appnum rc=0 appnum=0
C: cmd=get_my_kvsname
S: cmd=my_kvsname rc=0 kvsname=job
C: cmd=get kvsname=job key=PMI_process_mapping
S: cmd=get_result rc=0 value=(vector,(0,2,1))
C: cmd=get kvsname=job key=PMI_hwloc_xmlfile
S: cmd=get_result rc=-1
C: cmd=get kvsname=job key=PMI_mpi_memory_alloc_kinds
S: cmd=get_result rc=-1
C: cmd=put kvsname=job key=-allgather-1-0 value=segments=2
S: cmd=put_result rc=0
C: cmd=put kvsname=job key=-allgather-1-0-seg-1/2 value=207CC56E5E0C5CC760[2]63=7577CC 2B
S: cmd=put_result rc=0
C: cmd=barrier_in
S: cmd=barrier_out rc=0
C: cmd=get kvsname=job key=-allgather-1-0
S: cmd=get_result rc=0 value=segments=2
C: cmd=get kvsname=job key=-allgather-1-0-seg-1/2
S: cmd=get_result rc=0 value=207CC56E5E0C5CC760[2]63=7577CC 2B
C: cmd=get_universe_size
S: cmd=universe_size rc=0 size=2
C: cmd=barrier_in
S: cmd=barrier_out rc=0
C: cmd=finalize
S: cmd=finalize_ack rc=0
"""


def test_a_recorded_conversation():
    space = Space()
    manager = Manager(2, "job", mapping(["a", "b"]), space)
    lines = RECORDED.strip().splitlines()
    for asked, answered in zip(lines[::2], lines[1::2], strict=True):
        assert not manager.done
        reply = manager.answer(asked.removeprefix("C: "))
        assert reply.endswith("\n") and reply.count("\n") == 1
        assert parse(reply).items() >= parse(answered.removeprefix("S: ")).items(), asked
    assert space.barriers == 2 and manager.done


@pytest.mark.parametrize(
    ("line", "reply"),
    [
        ("cmd=spawn x=1", "cmd=spawn_result rc=-1"),
        ("cmd=publish_name service=a", "cmd=publish_name_result rc=-1"),
        ("hello", "cmd=unknown_result rc=-1"),
        ("", "cmd=unknown_result rc=-1"),
        ("cmd=put kvsname=job value=x", "cmd=put_result rc=-1"),
        (f"cmd=put key={'k' * 65} value=x", "cmd=put_result rc=-1"),
        (f"cmd=put key=k value={'v' * 1025}", "cmd=put_result rc=-1"),
        ("cmd=get key=nothing", "cmd=get_result rc=-1"),
        ("cmd=init pmi_version=2 pmi_subversion=0", "cmd=response_to_init pmi_version=1"),
        ("cmd=answer", "cmd=answer_result rc=-1"),
    ],
)
def test_what_is_not_understood_gets_an_answer(line, reply):
    assert Manager(1, "job", "", Space()).answer(line).startswith(reply)


def test_abort_has_no_answer():
    manager = Manager(1, "job", "", Space())
    assert manager.answer("cmd=abort exitcode=71") is None and manager.done


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        ("a", "(vector,(0,1,1))"),
        ("aaaa", "(vector,(0,1,4))"),
        ("aabbcc", "(vector,(0,3,2))"),
        ("aab", "(vector,(0,1,2),(1,1,1))"),
        ("abab", "(vector,(0,2,1),(0,2,1))"),
        ("aabbbcc", "(vector,(0,1,2),(1,1,3),(2,1,2))"),
        ("bba", "(vector,(0,1,2),(1,1,1))"),
    ],
)
def test_mapping(nodes, text):
    assert mapping(list(nodes)) == text


def peers(*pids):
    return [
        {"node": node_of_this_process(), "pid": pid, "pids": pid_space(), "host": "here"}
        for pid in pids
    ]


def test_two_servers_share_a_store():
    """Two ranks put, meet, and see each other's values."""
    store, seen = HashStore(), {}

    def rank_is(rank):
        server = Server(store, rank, 2, peers(os.getpid(), os.getpid()), "job", 20)
        with server, server._theirs.dup() as asking:
            file = asking.makefile("rw", newline="\n")
            for line in (f"cmd=put key=k{rank} value=v {rank}", "cmd=barrier_in",
                         f"cmd=get key=k{1 - rank}"):  # fmt: skip
                file.write(line + "\n")
                file.flush()
                seen[rank] = file.readline()

    threads = [threading.Thread(target=rank_is, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [parse(seen[rank])["value"] for rank in range(2)] == ["v 1", "v 0"]


def test_the_environment_is_told_and_forgets(monkeypatch):
    monkeypatch.setenv("PMI_RANK", "of an outer job")
    monkeypatch.delenv("PMI_FD", raising=False)
    monkeypatch.setenv("I_MPI_PMI_LIBRARY", "/site/libpmi2.so")  # of a session, for its sruns
    server = Server(HashStore(), 1, 2, peers(1, os.getpid()), "job", 20)
    with server.environment():
        assert "I_MPI_PMI_LIBRARY" not in os.environ
        assert os.environ["PMI_RANK"] == "1" and os.environ["PMI_SIZE"] == "2"
        assert not os.get_inheritable(int(os.environ["PMI_FD"]))
    assert os.environ["PMI_RANK"] == "of an outer job" and "PMI_FD" not in os.environ
    assert os.environ["I_MPI_PMI_LIBRARY"] == "/site/libpmi2.so"
    server._theirs.close()
    os.close(server.detach())


GIVES_UP = """
import os, subprocess, sys, time
sys.path.insert(0, {here!r})
from test_pmi import Server, HashStore, peers
child = subprocess.Popen(["sleep", "20"], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
try:
    with Server(HashStore(), 0, 2, peers(os.getpid(), child.pid), "job", {seconds}) as server:
        if {kill}:
            child.kill()
        server._theirs.sendall(b"cmd=barrier_in\\n")
        time.sleep(30)
finally:
    child.kill()
"""


@pytest.mark.parametrize(
    ("kill", "seconds", "says"),
    [(True, 60, r"rank 1 \(pid \d+ on here\) died while MPI started"),
     (False, 0.5, r"took longer than 0.5 s; missing: rank 1 on here")],
)  # fmt: skip
def test_a_start_that_cannot_end_is_ended(kill, seconds, says):
    """MPI_Init cannot be left by an exception."""
    program = GIVES_UP.format(here=os.path.dirname(__file__), kill=kill, seconds=seconds)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=25
    )
    assert done.returncode == 71, done.stderr
    assert re.search(says, done.stderr), done.stderr


def test_the_native_thread_answers_what_mpi_asks_at_its_end():
    program = """
import socket
from hpcdist import _engine
ours, theirs = socket.socketpair()
_engine.pmi_answer(ours.detach())
file = theirs.makefile("rw", newline="\\n")
def ask(text):
    file.write(text); file.flush()
    return file.readline().strip()
print(ask("cmd=barrier_in\\n"))
print(ask("mcmd=spawn\\nnprocs=1\\nargcnt=0\\nendcmd\\n"))
print(ask("cmd=lookup_name service=x\\n"))
theirs.sendall(b"x" * 10000 + b"\\n")
print(ask("cmd=fina"  + "lize\\n"))
try:
    _engine.pmi_answer(0)
except _engine.DistBackendError as error:
    print("once only")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines() == [
        "cmd=barrier_out rc=0",
        "cmd=spawn_result rc=-1 msg=there_is_no_process_manager",
        "cmd=lookup_name_result rc=-1 msg=there_is_no_process_manager",
        "cmd=finalize_ack rc=0",
        "once only",
    ], done.stderr


def test_a_server_that_ends_leaves_no_thread():
    before = set(threading.enumerate())  # those of other tests may end meanwhile
    server = Server(HashStore(), 0, 1, peers(os.getpid()), "job", 20)
    with server:
        (own,) = set(threading.enumerate()) - before
    assert not own.is_alive()
    assert isinstance(server._ours, socket.socket)
    os.close(server.detach())


def test_a_program_with_many_open_files():
    """select() takes no descriptor above 1023, and a large job has more."""
    program = """
import fcntl, json, os, resource, socket, sys
sys.path.insert(0, {here!r})
from test_pmi import Server, HashStore, peers
from hpcdist.debug.server import start
from hpcdist.startup import attendance
limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (min(limit, 4096), limit))
high = lambda number: fcntl.fcntl(number, fcntl.F_DUPFD, 2000)
server = Server(HashStore(), 0, 1, peers(os.getpid()), "job", 20)
server._ours = socket.socket(fileno=high(server._ours.fileno()))
with server:
    server._theirs.sendall(b"cmd=init pmi_version=1 pmi_subversion=1\\n")
    print(server._theirs.recv(100).decode().strip())
ours, theirs = socket.socketpair()
os.environ["PMI_FD"], os.environ["MPI_LOCALRANKID"] = str(high(ours.fileno())), "0"
theirs.sendall(b"cmd=my_kvsname kvsname=one\\n")
print(attendance._hydras_job())
read, write = os.pipe()
os.write(write, b'{{"port": 3}}\\n')
print(start._first_answer(high(read))[0])
"""
    done = subprocess.run(
        [sys.executable, "-c", program.format(here=os.path.dirname(__file__))],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0",
        "cmd=my_kvsname kvsname=one",
        "{'port': 3}",
    ], (done.stdout, done.stderr)
