"""hpcdist.breakpoint under mpirun in a terminal: on the rank mpirun talks to, and on another."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from jobs import mpirun_command
from terminals import PATIENCE, Terminal

from hpcdist.debug import breakpoints

pytestmark = pytest.mark.jobs

PROGRAM = str(Path(__file__).parent / "breakpoints.py")


def test_on_the_rank_that_mpirun_talks_to():
    command, env = mpirun_command(2)
    with Terminal(*command, sys.executable, PROGRAM, "0", env=env) as terminal:
        terminal.until(r"train\(\)")
        terminal.until(r"\(Pdb, rank 0\) ")
        terminal.type("p secret")
        terminal.until("'only-rank-0-knows-1'")  # the caller's frame, at the second call
        time.sleep(1.5)  # longer than the group's timeout
        terminal.type("next")
        terminal.until(r"-> return secret, after - before|-> after = ")
        terminal.type("p dist.get_rank()")
        terminal.until(r"\b0\b")
        terminal.type("continue")
        waited = sorted(terminal.until(r"rank (\d) waited 0\.\d ([1-9][\d.]*)")[1] for _ in "01")
        assert waited == ["0", "1"]
        assert terminal.end() == 0


def test_on_another_rank_through_a_socket():
    """Rank 1 has no input under either mpirun: it prints how to attach."""
    command, env = mpirun_command(2)
    with Terminal(*command, sys.executable, PROGRAM, "1", env=env) as terminal:
        found = terminal.until(r"python (-m hpcdist attach (\S+))")
        path = Path(found[2])
        assert path.parent.stat().st_mode & 0o777 == 0o700
        with Terminal(sys.executable, *found[1].split()) as attached:
            attached.until(r"\(Pdb, rank 1\) ")
            attached.type("p secret")
            attached.until("'only-rank-1-knows-1'")
            attached.type("continue")
            assert attached.process.wait(PATIENCE) == 0
        for _ in "01":
            terminal.until(r"rank \d waited")
        assert terminal.end() == 0
        assert not path.parent.exists()


def test_the_process_that_attached_may_go():
    command, env = mpirun_command(2)
    with Terminal(*command, sys.executable, PROGRAM, "1", env=env) as terminal:
        found = terminal.until(r"python (-m hpcdist attach \S+)")
        with Terminal(sys.executable, *found[1].split()) as attached:
            attached.until(r"\(Pdb, rank 1\) ")
            attached.process.kill()
        for _ in "01":
            terminal.until(r"rank \d waited")
        assert terminal.end() == 0


def test_attaching_where_nobody_waits():
    done = subprocess.run(
        [sys.executable, "-m", "hpcdist", "attach", "/nowhere/rank1"],
        capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 1 and "no rank waits at /nowhere/rank1" in done.stderr


# --- the end of input ----------------------------------------------------------------------------


def run(commands: bytes | int, *arguments: str, **more: str) -> str:
    """Run the program on two ranks, with these commands (or this file) as mpirun's input."""
    command, env = mpirun_command(2)
    env = {k: v for k, v in env.items() if k not in ("SLURM_JOB_ID", "PBS_JOBID")}
    given = {"input": commands} if isinstance(commands, bytes) else {"stdin": commands}
    done = subprocess.run(
        [*command, sys.executable, PROGRAM, "0", "60", *arguments],
        **given, env=env | more, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=PATIENCE,
    )  # fmt: skip
    text = done.stdout.decode()
    assert done.returncode == 0, text
    assert sorted(re.findall(r"rank (\d) waited", text)) == ["0", "1"], text
    return text


@pytest.mark.parametrize("commands", [subprocess.DEVNULL, b""], ids=["/dev/null", "empty"])
def test_it_goes_on_where_there_is_no_input(commands: bytes | int) -> None:
    assert "breakpoint: standard input is at its end: going on" in run(commands)


def test_the_end_of_input_continues(tmp_path: Path) -> None:
    """Open MPI's mpirun keeps the rank's pipe open after the end of its own input."""
    text = run(b"p secret\np 6 * 7")  # the last line has no end
    assert re.search(r"'only-rank-0-knows-1'.*^42.*end of input: going on", text, re.M | re.S)
    (tmp_path / "commands").write_text("p secret\n")
    with open(tmp_path / "commands", "rb") as file:
        assert "'only-rank-0-knows-1'" in run(file.fileno())


def test_an_exception_in_the_debugger_reaches_the_other_ranks() -> None:
    """They wait there without a limit; a notebook, for example, catches what `quit` raises."""
    text = run(b"p secret\nquit\n", "go on")
    assert "rank 0 caught BdbQuit" in text
    assert "rank 1 caught DistError: rank 0 could not take part: BdbQuit" in text, text


def test_in_a_batch_job_the_user_attaches() -> None:
    """Its input is /dev/null, and the user is elsewhere."""
    command, env = mpirun_command(2)
    process = subprocess.Popen(
        [*command, sys.executable, PROGRAM, "0", "60"],
        env=env | {"PBS_JOBID": "7"}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        found = None
        while not found and (line := process.stdout.readline()):
            found = re.search(r"hpcdist attach (\S+)", line)
        with Terminal(sys.executable, "-m", "hpcdist", "attach", found[1]) as attached:
            attached.until(r"\(Pdb, rank 0\) ")
            attached.type("continue")
            assert attached.process.wait(PATIENCE) == 0
        text = process.communicate(timeout=PATIENCE)[0]
        assert process.returncode == 0 and text.count("waited") == 2, text
    finally:
        process.kill()
        process.wait()


def test_where_the_folder_for_temporary_files_has_a_long_name(tmp_path, monkeypatch) -> None:
    """A socket's path has 107 bytes; a batch system's folder of a job may have more."""
    folder = tmp_path / ("job" * 40)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with socket.socket(socket.AF_UNIX) as client:
        monkeypatch.setattr(breakpoints, "_say", lambda _, text: client.connect(text.split()[-1]))
        with breakpoints._connect(0) as served:
            client.sendall(b"where")
            assert served.recv(5) == b"where"
