"""Jobs on a real Slurm with two virtual nodes: srun, sbatch, the wrong plugin, a rank that dies."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jobs import find_mpirun
from ports import free_port
from slurm import CLUSTER, Cluster

pytestmark = [pytest.mark.jobs, pytest.mark.slurm, pytest.mark.rare]

PROGRAMS = str(Path(__file__).with_name("slurm_programs.py"))


def test_an_address_is_enough_for_mpich_on_two_nodes(cluster: Cluster) -> None:
    """srun starts plain processes; tcp:// makes one MPI world of them, twice."""
    port = str(free_port())
    options = ("-N2", "-n4", "--ntasks-per-node=2", "--kill-on-bad-exit=1")
    ended = cluster.srun(*options, PROGRAMS, "meets", port, mpi="none")
    if cluster.plugin == "pmix":
        assert ended.code != 0 and "needs PMIx" in ended.text, ended.text
        return
    found = sorted(re.findall(r"^together (\d) of 4 on (hpc\d)$", ended.text, re.MULTILINE))
    ranks = [("0", "hpc1"), ("1", "hpc1"), ("2", "hpc2"), ("3", "hpc2")]
    assert ended.code == 0 and found == sorted(2 * ranks), ended.text


@pytest.mark.parametrize("ranks", [["-n4"], ["-n4", "--ntasks-per-node=2"]], ids=["3+1", "2+2"])
def test_srun_over_two_nodes(cluster: Cluster, ranks: list[str]) -> None:
    ended = cluster.srun("-N2", *ranks, PROGRAMS, "nodes")
    assert ended.code == 0 and ended.text.count("well") == 4, ended.text


def test_more_ranks_than_cores(cluster: Cluster) -> None:
    ended = cluster.srun("--overcommit", "-N2", "-n9", PROGRAMS, "hello")
    assert ended.code == 0 and ended.text.count("sum 9,") == 9, ended.text


@pytest.mark.parametrize("wrong", ["none", "the other"])
def test_wrong_plugin_is_an_error_that_names_the_right_one(cluster: Cluster, wrong: str) -> None:
    """Intel MPI takes both plugins."""
    right = cluster.plugin
    other = {"pmix": "pmi2", "pmi2": "pmix"}[right]
    ended = cluster.srun("-N2", "-n3", PROGRAMS, "hello", mpi="none" if wrong == "none" else other)
    if wrong != "none" and other in cluster.plugins:
        assert ended.code == 0 and ended.text.count("sum 3,") == 3, ended.text
        return
    assert ended.code != 0 and "well" not in ended.text, ended.text
    assert f"Use: srun --mpi={right}" in ended.text, ended.text


def test_mpirun_inside_sbatch(cluster: Cluster, tmp_path: Path) -> None:
    """Every rank sees the batch script's SLURM_PROCID=0; ranks and nodes are MPI's all the same."""
    script = tmp_path / "job.sh"
    bind = "--bind-to none" if cluster.plugin == "pmix" else ""
    program = f"{sys.executable} {PROGRAMS} hello"
    script.write_text(f"#!/bin/bash\nmpirun {bind} -n 4 {program}\necho ended with $?\n")
    ended = cluster.sbatch("-N2", "--ntasks-per-node=2", str(script))
    assert ended.code == 0 and "ended with 0" in ended.text, ended.text
    found = sorted(re.findall(r"^rank (\d) of 4 on (hpc\d): sum 4,", ended.text, re.MULTILINE))
    assert found == [("0", "hpc1"), ("1", "hpc1"), ("2", "hpc2"), ("3", "hpc2")], ended.text


def kill_the_last(cluster: Cluster, *options: str) -> str:
    """Start a job of which the last rank is killed; return what it printed until it ended."""
    ended = cluster.srun("-N2", *options, PROGRAMS, "dies", limit=30)
    began = re.search(r"^began ([0-9.]+)$", ended.text, re.MULTILINE)
    assert ended.code != 0 and began, ended.text
    assert "an all_reduce without all ranks" not in ended.text
    return ended.text


def test_a_killed_rank_of_the_other_node_ends_the_job(cluster: Cluster) -> None:
    """Its neighbour notices and aborts, without srun's help."""
    for _ in range(3):
        options = ("-n4", "--ntasks-per-node=2", "--kill-on-bad-exit=0")
        text = kill_the_last(cluster, *options)
        # On the first node Open MPI may be faster: it aborts when the connection breaks.
        if not re.search(r"hpc1: tasks? \S+: Exited with exit code", text):
            break
    assert "died without leaving" in text, text


def test_srun_ends_the_job_of_a_killed_rank_that_was_alone_on_its_node(cluster: Cluster) -> None:
    kill_the_last(cluster, "-n3", "--kill-on-bad-exit=1")


def test_a_killed_job_is_started_again(cluster: Cluster, tmp_path: Path) -> None:
    """By srun, on the nodes of the allocation; each has the other's commits as well."""
    program = str(Path(__file__).parents[1] / "elastic" / "restarts.py")
    launch = [sys.executable, "-m", "hpcdist", "launch", "--no-label", "--max-restarts", "1"]
    what = [program, "zero", "6", str(tmp_path), "1=begin3"]
    ended = cluster.command("salloc", "-N2", "--ntasks-per-node=1", *launch, "-n", "2", *what)
    assert ended.code == 0 and "began 3 " in ended.text, ended.text
    line = r"restart 1 of 1: .*; now 2 ranks on hpc1, hpc2$"
    assert re.search(line, ended.text, re.MULTILINE), ended.text


# --- the cluster's own script --------------------------------------------------------------------


def script(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([CLUSTER, *arguments], capture_output=True, text=True, timeout=90)


def processes(folder: Path) -> list[str]:
    """The processes that speak of a cluster's folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if str(folder) in line or str(folder) in (entry / "environ").read_text():
                found.append(f"{entry.name}: {line}")
        except (OSError, UnicodeDecodeError):
            continue
    return found


@pytest.mark.any_mpi
def test_two_clusters_and_nothing_left(cluster: Cluster, tmp_path: Path) -> None:
    """`run` starts a cluster beside the other one and ends it, with a process that left its job."""
    folder = tmp_path / "second"
    leave = "setsid -f sleep 1000 <&- >&- 2>&-; sinfo --noheader --Node --format=%N-%T; exit 7"
    done = script("run", "--dir", str(folder), "--nodes", "3", "srun", "-N1", "bash", "-c", leave)
    assert done.returncode == 7, done.stderr
    assert [line.split("-")[0] for line in done.stdout.split()] == ["hpc1", "hpc2", "hpc3"]
    assert not folder.exists()
    # a process that was killed may take a moment to go
    until = time.monotonic() + 3
    while processes(folder) and time.monotonic() < until:
        time.sleep(0.1)
    assert processes(folder) == []
    assert cluster.command("sinfo").code == 0


@pytest.mark.any_mpi
def test_a_cluster_that_cannot_start_shows_why(cluster: Cluster, tmp_path: Path) -> None:
    again = script("start", "--dir", str(cluster.folder))
    assert again.returncode == 1 and "already up" in again.stderr
    (tmp_path / "file").write_text("")
    nowhere = script("start", "--dir", str(tmp_path))
    assert nowhere.returncode == 1 and f"{tmp_path} is there" in nowhere.stderr
    assert script("status", "--dir", str(tmp_path / "none")).returncode == 1
    assert script("stop", "--dir", str(tmp_path)).returncode == 1
    assert (tmp_path / "file").exists()
    assert "takes a positive number" in script("start", "--nodes", "0").stderr


def test_it_is_the_mpi_under_test(cluster: Cluster) -> None:
    """Or the tests above would pass for another one."""
    assert cluster.env["PATH"].startswith(str(Path(find_mpirun()).parent))
