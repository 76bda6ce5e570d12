"""A stage of tests/run.py: one pytest run, shown as it goes, with what came of it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import crashes
from jobs import own_files
from places import TESTS
from turns import Turns

#: Lines that a stage wrote last which are repeated at the end when it broke down.
LAST_LINES = 60


@dataclass
class Stage:
    """One pytest run, the number of its processes, and what came of it.

    Attributes
    ----------
    command : list of str
        The pytest call without the tests.
    tests : list of str
        Files, or files and tests: ``tests/mesh/test_mesh.py::test_sizes[2]``.
    failures : list of [str, str]
        Tests that failed, each with its whole report.
    problem : str
        Why the stage broke down; "" if it ran to its end.
    last, crash : sequence of bytes
        The lines that it wrote last, and those from its first crash on.
    """

    name: str
    command: list[str]
    tests: list[str]
    env: dict[str, str]
    processes: int
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    problem: str = ""
    slowest: list[list] = field(default_factory=list)
    failures: list[list[str]] = field(default_factory=list)
    last: deque[bytes] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    crash: list[bytes] = field(default_factory=list)
    process: subprocess.Popen | None = None

    @property
    def seed(self) -> str:
        """Of its random data; chosen here, so that it is known when a crash takes the output."""
        return self.env.setdefault("HPCDIST_TEST_SEED", str(random.randrange(1 << 31)))


def run(stage: Stage, timeout: float, turns: Turns) -> None:
    """Run one stage and fill in what came of it."""
    turns.write(stage.name, f"\n=== {stage.name} (HPCDIST_TEST_SEED={stage.seed})\n".encode())
    began = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        report = Path(folder) / "report.json"
        env = {**stage.env, "HPCDIST_TEST_REPORT": str(report), **own_files(folder)}
        # A session of its own, so that a timeout can end mpirun with all it started.
        # Not from the repository's root: `-m` puts the working directory in front of sys.path, and
        # the unbuilt source tree would hide the installed package.
        process = stage.process = subprocess.Popen(
            [*stage.command, *stage.tests],
            env=env,
            cwd=TESTS,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        echo = threading.Thread(target=show, args=(process.stdout, stage, turns), daemon=True)
        echo.start()
        try:
            code = process.wait(timeout)
            echo.join(10)  # what a test left running may hold the pipe open
        except subprocess.TimeoutExpired:
            stage.problem = f"not done after {timeout:g} s"
            end(process)
            code = -1
        stage.seconds = time.monotonic() - began
        if report.exists():
            for name, value in json.loads(report.read_text()).items():
                setattr(stage, name, value)
        elif code == 0:
            # A test has ended the process, or the disk is full.
            stage.problem = "ended with exit code 0 and no report"
    if stage.problem:
        return
    if code not in (0, 1, 5) or (code == 1 and not stage.failed):
        stage.problem = f"ended with exit code {code}"
        told = crashes.of([line.decode(errors="replace") for line in stage.crash])
        stage.problem += f": {told}" if told else ""


def show(output: BinaryIO, stage: Stage, turns: Turns) -> None:
    """Copy a stage's output to this terminal as it comes; remember the last lines."""
    line = b""
    while text := os.read(output.fileno(), 1 << 16):
        turns.write(stage.name, text)
        *lines, line = (line + text).split(b"\n")
        stage.last.extend(lines)
        for each in lines:
            if stage.crash or crashes.BEGINS.search(each):
                stage.crash.append(each)
        del stage.crash[crashes.LINES :]


def end(process: subprocess.Popen) -> None:
    """End an mpirun and its ranks: ask it first, it knows them all."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
