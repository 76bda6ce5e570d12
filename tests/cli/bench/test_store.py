"""``python -m hpcdist bench store``: its table, and that it looks at what it measures."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]


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
