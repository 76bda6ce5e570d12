"""A job on two nodes: the debug server and ``top`` show the ranks of both."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from ports import free_port
from slurm import CLUSTER

from hpcdist.recordings import read

pytestmark = [pytest.mark.jobs, pytest.mark.slurm, pytest.mark.rare]

PROGRAM = Path(__file__).parents[1] / "debug" / "served.py"
LINES = PROGRAM.read_text().splitlines()
TOKEN = "a-token-of-the-test"
SECONDS = 100


def line_of(mark: str) -> int:
    return next(n for n, line in enumerate(LINES, 1) if line.endswith(f"# {mark}"))


@pytest.fixture(scope="module")
def job(cluster) -> Iterator[tuple[str, str, int]]:
    """A job whose rank 1, on the second node, is late: its number, the page, the reports' port."""
    port = free_port()
    command = ["srun", f"--mpi={cluster.plugin}", "-N2", "-n2", sys.executable, str(PROGRAM)]
    process = subprocess.Popen(
        [CLUSTER, "run", "--dir", str(cluster.folder), "--", *command, "hang", str(SECONDS)],
        env=cluster.env | {"WORKER_PORT": str(port)}, cwd=cluster.folder, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        assert process.stdout
        text = ""
        while text.count("\npid ") + text.startswith("pid ") < 2:
            line = process.stdout.readline()
            assert line, text
            text += line
        page = re.findall(r"(http://127.0.0.1:\d+)/", text)[0]
        number = cluster.command("squeue", "-h", "-o", "%A").text.split()[0]
        yield number, page, port
    finally:
        cluster.cancel()
        process.communicate(timeout=60)


def get(page: str, path: str) -> bytes:
    request = urllib.request.Request(page + path, headers={"Authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return bytes(answer.read())


def test_the_page_has_the_ranks_of_both_nodes(job, tmp_path):
    _, page, _ = job
    hung = f"served.py:{line_of('hung: hang')} in hang"
    end = time.monotonic() + 30
    while True:
        state = json.loads(get(page, "/state"))
        if state["hangs"] and len(state["rows"]) == 2 and hung in state["rows"][1]["where"]:
            break
        assert time.monotonic() < end, state
        time.sleep(0.3)
    assert [row["host"] for row in state["rows"]] == ["hpc1", "hpc2"]
    assert sorted(node["node"] for node in state["nodes"]) == ["hpc1", "hpc2"]
    assert not any(node["silent"] for node in state["nodes"])
    (hang,) = state["hangs"]
    assert (hang["waiting"], hang["missing"]) == ([0], [1])
    assert f"served.py:{line_of('here: hang')} in hang" in hang["calls"][0]["call"]
    stacks = json.loads(get(page, "/stacks/1"))["stacks"]
    assert f"line {line_of('hung: hang')} in hang" in stacks and "native" in stacks
    (tmp_path / "one").write_bytes(get(page, "/recorder/1"))
    one = read(tmp_path / "one")
    assert (one.rank, one.host) == (1, "hpc2")
    analysis = get(page, "/timeline").decode()
    assert "rank 1 (hpc2 pid" in analysis and "rank 1: has not called it" in analysis


def test_reports_that_are_not_signed_are_refused(job):
    _, page, port = job
    for headers in ({}, {"X-Turn": "9", "X-Signature": "00"}, {"X-Turn": "x"}):
        request = urllib.request.Request(f"http://127.0.0.1:{port}/", b"{}", headers)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=30)
        assert refused.value.code == 403
    assert len(json.loads(get(page, "/state"))["rows"]) == 2


def test_top_has_the_ranks_of_both_nodes(job, cluster):
    number, _, _ = job
    shown = cluster.command(sys.executable, "-m", "hpcdist", "top", number, "--once")
    assert shown.code == 0 and "2 of 2 ranks" in shown.text, shown.text
    zero, one = shown.text.splitlines()[-2:]
    assert "hpc1" in zero and "is in barrier #" in zero and "served.py:" in zero
    assert "hpc2" in one and "is outside hpcdist for" in one
    stacks = cluster.command(sys.executable, "-m", "hpcdist", "top", number, "--stacks").text
    assert f'served.py", line {line_of("hung: hang")} in hang' in stacks, stacks
