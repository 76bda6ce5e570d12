"""The debug server: what it shows, whom it refuses, and that the job does not notice."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from jobs import mpirun_command, run_job
from prometheus_client.parser import text_string_to_metric_families

from hpcdist.recordings import read

pytestmark = [pytest.mark.jobs, pytest.mark.rare]

PROGRAM = Path(__file__).with_name("served.py")
TOKEN = "a-token-of-the-test"
LINES = PROGRAM.read_text().splitlines()


def line_of(mark: str) -> int:
    return next(n for n, line in enumerate(LINES, 1) if line.endswith(f"# {mark}"))


class Job:
    """A job, and requests to its server."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None) -> None:
        command, full = mpirun_command(2, env)
        self.process = subprocess.Popen(
            [*command, sys.executable, str(PROGRAM), *arguments], env=full, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.pids: dict[int, int] = {}
        addresses = set()
        text = ""
        assert self.process.stdout
        while len(self.pids) < 2:
            line = self.process.stdout.readline()
            assert line, text
            text += line
            if line.startswith("pid "):
                _, rank, pid, address = line.split()
                self.pids[int(rank)] = int(pid)
                addresses.add(address)
        (address,) = addresses
        assert address.endswith(f"/?token={TOKEN}")
        self.port = int(address.split(":")[2].split("/")[0])

    def ask(
        self, path: str, method: str = "GET", body: bytes = b"", **headers: str
    ) -> tuple[int, bytes, http.client.HTTPMessage]:
        """Make a request as it is, without a token of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, body or None, headers)
            answer = connection.getresponse()
            return answer.status, answer.read(), answer.headers
        finally:
            connection.close()

    def get(self, path: str) -> bytes:
        status, body, _ = self.ask(path, Authorization=f"Bearer {TOKEN}")
        assert status == 200, (path, status, body)
        return body

    def servers(self) -> list[int]:
        """The server's processes, which belong to this job's ranks."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = (process / "cmdline").read_bytes().split(b"\0")
                parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
                if b"hpcdist.debug.server" in words and parent in self.pids.values():
                    found.append(int(process.name))
        return found

    def end(self) -> tuple[int, str]:
        text, _ = self.process.communicate(timeout=60)
        return self.process.returncode, text


@contextmanager
def job(*arguments: str, env: dict[str, str] | None = None) -> Iterator[Job]:
    one = Job(*arguments, env=env)
    try:
        yield one
    finally:
        one.process.kill()
        one.process.wait()


def gone(pids: list[int], seconds: float = 5.0) -> bool:
    """Whether these processes end."""
    end = time.monotonic() + seconds
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def wait_for_line(one: Job, line: int) -> dict:
    """The state, once the missing rank has been asked where it is."""
    end = time.monotonic() + 20
    while True:
        state = json.loads(one.get("/state"))
        if f"served.py:{line} in" in state["rows"][1]["where"] and state["hangs"]:
            return state
        assert time.monotonic() < end, state
        time.sleep(0.3)


@pytest.mark.parametrize("kind", ["hang", "bridge"])
def test_a_hung_job_is_shown(kind, tmp_path):
    with job(kind, "8", env={"HPCDIST_DUMP": str(tmp_path)}) as one:
        state = wait_for_line(one, line_of(f"hung: {kind}"))
        (hang,) = state["hangs"]
        assert (hang["waiting"], hang["missing"]) == ([0], [1]) and hang["seconds"] > 1
        assert f"served.py:{line_of(f'here: {kind}')} in {kind}" in hang["calls"][0]["call"]
        assert [row["rank"] for row in state["rows"]] == [0, 1] and state["size"] == 2
        assert [row["pid"] for row in state["rows"]] == [one.pids[0], one.pids[1]]
        assert state["rows"][0]["inside"] and not state["rows"][1]["inside"]
        assert all(row["resident"] > 1 << 20 for row in state["rows"])
        assert state["nodes"][0]["ranks"] == 2 and state["nodes"][0]["memory"]["total"] > 1 << 20
        stacks = json.loads(one.get("/stacks/1"))
        assert f"line {line_of(f'hung: {kind}')} in {kind}" in stacks["stacks"]
        families = {f.name: f for f in text_string_to_metric_families(one.get("/metrics").decode())}
        values = {s.labels["rank"]: s.value for s in families["hpcdist_in_operation"].samples}
        assert values == {"0": 1.0, "1": 0.0}
        assert families["hpcdist_ranks_missing"].samples[0].value == 1
        assert families["hpcdist_calls"].samples[0].value >= 2
        page = one.get("/timeline").decode()
        assert "First divergence" in page and "rank 1: has not called it" in page
        (tmp_path / "one").write_bytes(one.get("/recorder/1"))
        assert read(tmp_path / "one").rank == 1
        assert b"hpcdist" in one.get("/")
        servers = one.servers()
        assert len(servers) == 1
        code, text = one.end()
        assert code == 0 and text.count("end ") == 2, text
        assert gone(servers)


PATHS = (
    "/../../etc/passwd", "/dump/../../../etc/passwd", "/dump/..%2f..%2f..%2fetc%2fpasswd",
    "/dump/%2e%2e%2fetc%2fpasswd", "/dump/%00", "/recorder/../1", "/recorder/-1", "/recorder/1;id",
    "/recorder/99999999", "/recorder/9999999999999999999999", "/stacks/7", "/stacks/1%0aid",
    "//etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/static/../../etc/passwd", "/dump/\u00e9",
)  # fmt: skip


def refuse_without_a_token(one: Job) -> None:
    for path in ("/", "/state", "/metrics", "/timeline", "/recorder/0", "/nothing", "/stacks/0"):
        for headers in (
            {},
            {"Authorization": "Bearer a-token-of-the-tesT"},
            {"Authorization": f"Bearer {TOKEN}x"},
            {"Authorization": f"Basic {TOKEN}"},
            {"Authorization": "Bearer "},
            {"Cookie": f"hpcdist-{one.port}=; hpcdist-{one.port}={TOKEN}"},
        ):
            status, body, sent = one.ask(path, **headers)
            assert status == 401 and b"token" in body and TOKEN.encode() not in body
            assert sent["Cache-Control"] == "no-store"
        if path != "/":  # an address with the token may be in logs: only the page takes one
            assert one.ask(f"{path}?token={TOKEN}")[0] == 401
    assert one.ask("/?token=")[0] == one.ask("/?token=%ff%fe")[0] == 401


def sign_in(one: Job) -> str:
    status, _, sent = one.ask(f"/?token={TOKEN}")
    cookie = sent["Set-Cookie"]
    assert status == 303 and sent["Location"] == "/"
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie and TOKEN not in cookie
    return str(cookie.split(";")[0])


def refuse_tricks(one: Job) -> None:
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    for path in PATHS:
        with socket.create_connection(("127.0.0.1", one.port), 30) as raw:  # as it is
            raw.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
                        "Connection: close\r\n\r\n".encode())  # fmt: skip
            answer = b"".join(iter(lambda: raw.recv(65536), b""))
        assert answer.split()[1] in (b"400", b"404"), (path, answer[:200])
        assert b"root:" not in answer, path
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert one.ask("/state", method, **bearer)[0] == 405
    status, _, sent = one.ask("/", Cookie=sign_in(one))
    assert status == 200 and "default-src 'none'" in sent["Content-Security-Policy"]


def refuse_what_is_huge(one: Job) -> None:
    for raw in (
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X-A: " + b"b" * 100_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X-A: b\r\n" * 50_000 + b"\r\n",
        b"POST /state HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n" + b"c" * 5_000_000,
        b"\x16\x03\x01" + os.urandom(300_000),
    ):
        with socket.create_connection(("127.0.0.1", one.port), 30) as sent:
            answer = b""
            with suppress(OSError):  # it may end the connection before all is sent
                sent.sendall(raw)
                while piece := sent.recv(65536):
                    answer += piece
            assert not answer or answer.split()[1] in (b"400", b"401", b"413"), answer[:200]


def test_attacks(tmp_path, count):
    """All at once, on a job that works and checks its results."""
    end = tmp_path / "end"
    with job(
        "work", "90", env={"HPCDIST_DUMP": str(tmp_path / "none"), "SERVED_END": str(end)}
    ) as one:
        slow = [socket.create_connection(("127.0.0.1", one.port), 30) for _ in range(20)]
        for each in slow:
            each.sendall(b"GET /state HTTP/1.1\r\nHost: x\r\n")  # and no end
        refuse_without_a_token(one)
        refuse_tricks(one)
        refuse_what_is_huge(one)
        many = [socket.create_connection(("127.0.0.1", one.port), 30) for _ in range(300)]
        asked = time.monotonic()
        state = json.loads(one.get("/state"))  # another one's place is taken
        assert time.monotonic() - asked < 5 and not state["hangs"]
        assert state["rows"][0]["operations"] > 1000
        (server,) = one.servers()
        assert len(list(Path(f"/proc/{server}/fd").iterdir())) < 200
        memory = Path(f"/proc/{server}/status").read_text().split("VmRSS:")[1].split()[0]
        assert int(memory) < 400_000, memory
        for each in [*slow, *many]:
            each.settimeout(30)
            with suppress(OSError):
                assert each.recv(100) == b""  # ended, without an answer
            each.close()
        count(len(slow) + len(many) + 7 * 6 + len(PATHS) + 5 + 5)
        assert one.process.poll() is None  # the server ended them, not the job's end
        end.touch()
        code, text = one.end()
        assert code == 0 and text.count("end ") == 2, text
        assert gone([server])


def test_a_killed_rank(count):
    with job("work", "30") as one:
        servers = one.servers()
        assert json.loads(one.get("/state"))["size"] == 2 and len(servers) == 1
        os.kill(one.pids[1], signal.SIGKILL)
        code, text = one.end()
        assert code != 0, text
        assert gone(servers)
        count(1)


def test_a_killed_server(count, tmp_path):
    """The job goes on."""
    end = tmp_path / "end"
    with job("work", "90", env={"SERVED_END": str(end)}) as one:
        (server,) = one.servers()
        os.kill(server, signal.SIGKILL)
        time.sleep(2.0)  # at work
        end.touch()
        code, text = one.end()
        assert code == 0 and text.count("end ") == 2, text
        count(1)


def test_starts_that_fail():
    ended = run_job(2, str(PROGRAM), "errors")
    assert ended.code == 0 and ended.text.count("end ") == 2, ended.text
    for said in (
        "before: DistError: there is no process group: call init_process_group first",
        "token: ValueError: rank 1: token must have 8 to 256 letters, digits or ._~-",
        "nowhere: ValueError: rank 1: host must be an address, such as 127.0.0.1, not ''",
        "port: ValueError: rank 1: port must be a whole number from 0 to 65535, not 1.5",
        "worker: ValueError: rank 0: worker_port must be a whole number from 0 to 65535, not 65536",
        "missing: ImportError: rank 1: the debug server needs aiohttp: pip install 'hpcdist[debug]",
        "again: DistError: rank 0: the debug server runs already",
        "host: DistError: rank 0: the debug server has not started: ",
    ):
        assert ended.text.count(said) == 2, (said, ended.text)
