"""Show what each rank of a running job is in, since when, and where it hangs.

JOB is the job's eight digits, the pid of one of its ranks here, or Slurm's number of the job;
without it, the only job of this user on this node. The command reads the ranks' flight recorders,
so the job needs no setting and does not notice, but for --stacks, which interrupts each main thread
for some microseconds. A node has the recorders of its own ranks: for a job on several nodes name
them with --hosts, which starts this command there through ssh; under Slurm its number is enough.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO

from hpcdist.cli.analyze import printable
from hpcdist.recordings import rows_of
from hpcdist.recordings.rows import SeveralJobsError, merged, survival

#: Seconds that another node has to answer.
_PATIENCE = 30.0
#: Seconds: a day.
_LONGEST = 86400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to a parser."""
    parser.add_argument("job", nargs="?", help="eight digits, a rank's pid, or Slurm's number")
    parser.add_argument("--once", action="store_true", help="print once; else every --interval")
    parser.add_argument("--interval", type=_seconds, default=1.0, metavar="S", help="seconds (1)")
    parser.add_argument("--stacks", action="store_true", help="once, with all threads' stacks")
    parser.add_argument("--json", action="store_true", help="once, as JSON")
    parser.add_argument("--hosts", default="", metavar="A,B", help="also the ranks on these nodes")
    parser.add_argument(
        "--ssh", default="ssh", metavar="COMMAND", help="what starts a command on a node (ssh)"
    )

    # on another node a pid is another process
    parser.add_argument("--elsewhere", action="store_true", help=argparse.SUPPRESS)
    # What srun runs: it cuts long lines.
    parser.add_argument("--encoded", action="store_true", help=argparse.SUPPRESS)


def _seconds(text: str) -> float:
    """Read an interval that one can sleep for."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= _LONGEST:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds from 0 to {_LONGEST}")
    return seconds


def run(options: argparse.Namespace) -> int:
    """Show the job; 1 if there is none."""
    before: list[dict[str, Any]] = []
    while True:
        try:
            rows = _everywhere(options)
        except (OSError, ValueError) as error:
            print(f"hpcdist top: {printable(str(error))}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:  # the usual end, also in the middle of a look
            return 0
        if options.encoded:
            print(base64.encodebytes(json.dumps(rows).encode()).decode(), end="")
            return 0
        if options.json:
            print(json.dumps(rows, indent=1))
            return 0
        text = printable("\n".join(_lines(rows, before, options.stacks)))
        if options.once or options.stacks:
            print(text)
            return 0
        home = "\033[H\033[2J" if sys.stdout.isatty() else ""
        print(f"{home}{text}", flush=True)
        if not any(row["alive"] for row in rows):
            return 0
        before = rows
        try:
            time.sleep(max(0.1, options.interval))
        except KeyboardInterrupt:
            return 0


# ---- other nodes ----


def remote_commands(options: argparse.Namespace, job: str | None = None) -> list[list[str]]:
    """Return the commands that show the ranks of other nodes, as JSON.

    Parameters
    ----------
    options : argparse.Namespace
        The command's.
    job : str, optional
        The digits of the job, if they are known.

    Returns
    -------
    list of list of str
        One per host; for a job of Slurm's one in all.
    """
    named = job or options.job
    arguments = ["-m", "hpcdist", "top", *([named] if named else []), "--json", "--elsewhere"]
    own = [sys.executable, *arguments, *(["--stacks"] if options.stacks else [])]
    hosts = [host for host in options.hosts.split(",") if host]
    if hosts:
        return [[*shlex.split(options.ssh), host, shlex.join(own)] for host in hosts]
    if options.elsewhere or not (options.job and options.job.isdigit() and shutil.which("srun")):
        return []
    if nodes := _nodes_of_slurm_job(options.job):
        # without the number srun takes one node
        on_each = ["--overlap", f"--nodes={nodes}", "--ntasks-per-node=1", "-l"]
        return [["srun", f"--jobid={options.job}", *on_each, *own, "--encoded"]]
    return []


def _nodes_of_slurm_job(job: str) -> int:
    """How many nodes a job of Slurm's has; 0 if there is no such job."""
    if not shutil.which("squeue"):
        return 0
    command = ["squeue", "-h", "-j", job, "-o", "%D"]
    try:
        asked = subprocess.run(
            command, capture_output=True, text=True, timeout=_PATIENCE, check=False
        )
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"squeue did not say within {_PATIENCE:.0f} s where job {job} runs; without its number "
            "the ranks of this node are shown"
        ) from None
    words = asked.stdout.split()
    return int(words[0]) if asked.returncode == 0 and words and words[0].isdigit() else 0


def _everywhere(options: argparse.Namespace) -> list[dict[str, Any]]:
    missing = None
    found: list[dict[str, Any]] = []
    try:
        found = rows_of(options.job, options.stacks, pids=not options.elsewhere)
    except SeveralJobsError:
        raise
    except ValueError as error:
        missing = error
    commands = remote_commands(options, found[0]["job"] if found else None)
    end = time.monotonic() + _PATIENCE  # the same for all nodes, that many may be silent
    with contextlib.ExitStack() as files:
        started = []
        for command in commands:
            # No pipes: the process that ssh leaves behind to share its connection may keep them.
            out, err = (
                files.enter_context(open(os.memfd_create(name), "w+", errors="replace"))
                for name in ("out", "err")
            )
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
            started.append((command, process, out, err))
        for each in started:
            found += _answer(*each, end)
    if not found:
        raise missing or ValueError("no rank was found")
    jobs = {row["job"]: row for row in found}
    if len(jobs) > 1:
        listed = [f"  {job}: {row['size']} ranks, {row['program']}" for job, row in jobs.items()]
        raise SeveralJobsError("several jobs fit; choose one by its digits:\n" + "\n".join(listed))
    return merged(found)


def _answer(
    command: list[str], process: subprocess.Popen[bytes], out: TextIO, err: TextIO, end: float
) -> list[dict[str, Any]]:
    """The rows that another node has sent; what it says besides goes to standard error."""
    try:
        process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for each in (out, err):
        each.seek(0)
    sent = out.read()
    found: list[dict[str, Any]] = []
    for text in _by_task(sent) if command[0] == "srun" else [sent]:
        try:
            found += json.loads(base64.b64decode(text) if command[0] == "srun" else text)
        except ValueError:
            continue  # nothing of the job is there, which it says on standard error
    if not found:
        where = command[-2] if command[0] != "srun" else "srun"
        said = printable(err.read().strip()) or "no answer"
        print(f"hpcdist top: {where}: {said}", file=sys.stderr)
    return found


def _by_task(out: str) -> list[str]:
    """What each task of ``srun -l`` says: their lines are mixed, each with the task's number."""
    tasks: dict[str, list[str]] = {}
    for line in out.splitlines():
        task, _, rest = line.partition(": ")
        tasks.setdefault(task.strip(), []).append(rest)
    return ["".join(lines) for lines in tasks.values()]


# ---- text ----


def _lines(rows: list[dict[str, Any]], before: list[dict[str, Any]], stacks: bool) -> Iterator[str]:
    first, ranks = rows[0], sum(not row["waits"] for row in rows)
    spares = f", {first['spares']} spare{'s' if first['spares'] != 1 else ''}"
    yield (
        f"job {first['job']}, {ranks} of {first['size']} ranks{spares if first['spares'] else ''}: "
        f"{first['program']}"
    )
    if len(rows) < first["size"] + first["spares"]:
        yield "(the others are on other nodes: --hosts)"
    if text := survival(rows):
        yield f"({text})"
    earlier = {_process(row): row for row in before}
    width = max(len(row["host"]) for row in rows)
    for row in rows:
        rate = _rate(row, earlier.get(_process(row)))
        name = f"spare {row['rank'] - row['size']:>3}" if row["waits"] else f"rank {row['rank']:>4}"
        yield f"{name} {row['host']:<{width}} {row['pid']:>7}{rate}  {_doing(row)}"
        for call in row["others"][:3]:
            yield f"{'':>12}also in {call}"
        if stacks and row["stacks"]:
            yield "\n".join(f"    {line}" for line in row["stacks"].splitlines())


def _doing(row: dict[str, Any]) -> str:
    if not row["alive"]:
        last = f"; last: {row['operation']}: {row['state']}" if row["operation"] else ""
        return f"has ended{last}"
    if row["waits"]:
        text = "waits for a death"
    elif not row["operation"]:
        text = "has called no operation yet"
    elif row["inside"]:
        text = f"is in {row['operation']} for {row['seconds']:.1f} s"
    else:
        text = f"is outside hpcdist for {row['seconds']:.1f} s; last: {row['operation']}"
        text += f": {row['state']}" if row["state"] != "done" else ""
    if row["silent"] > 2:
        text += f" (no sign of life for {row['silent']:.0f} s: stopped, or starved)"
    return text


def _process(row: dict[str, Any]) -> tuple[Any, ...]:
    """What stays of a rank from one look to the next, unless a spare has taken its place."""
    return row["rank"], row["host"], row["pid"]


def _rate(row: dict[str, Any], before: dict[str, Any] | None) -> str:
    """Operations and bytes since the last look, where there was one."""
    if before is None:
        return ""
    calls = row["operations"] - before["operations"]
    moved = sum(size for number, size in row["bytes"].items() if int(number) > before["operations"])
    more = "+" if calls > len(row["bytes"]) else ""
    return f" {calls:>7} calls {moved / 1e6:>9.3f}{more} MB"
