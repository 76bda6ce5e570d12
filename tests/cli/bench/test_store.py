"""``python -m hpcdist bench store``: its table, and that it looks at what it measures."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest

from hpcdist.cli.bench import store

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]


class TwoNodes:
    """What rank 0 sees of an MpiJob; the other rank is on a node that does not see its files."""

    first, rank, size = True, 0, 2
    said = ""

    def gather(self, value):
        return [value, "elsewhere"]

    def require(self, text):
        assert text is None, text

    def problem(self, text):
        return text or "elsewhere does not have rank 0's folder"

    def say(self, text):
        self.said += text


def test_ranks_on_two_nodes():
    job = TwoNodes()
    servers = store._Servers(job)
    try:
        assert servers.host == socket.gethostname()
        for port in (servers.ours, servers.theirs):  # an address that only listening on all has
            socket.create_connection(("127.0.0.2", port), 5.0).close()
        servers.host = "127.0.0.2"
        assert list(store._open(job, servers, "/tmp")) == ["TCPStore"]
        assert "no FileStore" in job.said and "--folder" in job.said
    finally:
        servers.close()


def test_the_table():
    command = [sys.executable, "-m", "hpcdist", "bench", "store", "-q", "-n", "2", "-w", "0"]
    done = subprocess.run(
        [*command, "-s", "10", "20K", "--folder", "/dev/shm", "--format", "json"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    seen = {(row["operation"], row["kind"], row["size_bytes"]) for row in rows}
    assert seen == {
        (operation, kind, size)
        for operation in ("set", "get", "add", "wait")
        for kind in ("TCPStore", "FileStore")
        for size in (10, 20 << 10)
    }
    for row in rows:
        assert row["wrong"] == 0 and row["hpcdist_us"] > 0 and row["torch_us"] > 0
        assert abs(row["ratio"] - row["torch_us"] / row["hpcdist_us"]) < 1e-6


def test_a_folder_that_is_not_there(tmp_path):
    command = [sys.executable, "-m", "hpcdist", "bench", "store", "--folder", str(tmp_path / "no")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "cannot make a folder for the FileStores" in done.stderr
    assert "Traceback" not in done.stderr
