"""Show what each rank of a running job is in, since when, and where it hangs.

JOB is the job's eight digits, the pid of one of its ranks, or Slurm's number of the job; without
it, the only job of this user on this node. The command reads the ranks' flight recorders, so the
job needs no setting and does not notice, but for --stacks, which interrupts each main thread for
some microseconds. A node has the recorders of its own ranks: for a job on several nodes name them
with --hosts, which starts this command there through ssh; under Slurm its number is enough.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpcdist.recordings import Operation, Recording, ask, find, folder_of_user, read

__all__ = ["add_arguments", "remote_commands", "rows_of", "run"]

#: Seconds that another node has to answer.
_PATIENCE = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to a parser."""
    parser.add_argument("job", nargs="?", help="eight digits, a rank's pid, or Slurm's number")
    parser.add_argument("--once", action="store_true", help="print once; else every --interval")
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds (1)")
    parser.add_argument("--stacks", action="store_true", help="once, with all threads' stacks")
    parser.add_argument("--json", action="store_true", help="once, as JSON")
    parser.add_argument("--hosts", default="", metavar="A,B", help="also the ranks on these nodes")
    parser.add_argument(
        "--ssh", default="ssh", metavar="COMMAND", help="what starts a command on a node (ssh)"
    )


def run(options: argparse.Namespace) -> int:
    """Show the job; 1 if there is none."""
    before: list[dict[str, Any]] = []
    while True:
        try:
            rows = _everywhere(options)
        except (OSError, ValueError) as error:
            print(f"hpcdist top: {error}", file=sys.stderr)
            return 1
        if options.json:
            print(json.dumps(rows, indent=1))
            return 0
        text = "\n".join(_lines(rows, before, options.stacks))
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


# ---- this node ----


def rows_of(job: str | None, stacks: bool) -> list[dict[str, Any]]:
    """Read the ranks of a job that this node has.

    Parameters
    ----------
    job : str, optional
        As for the command.
    stacks : bool
        Whether to ask for stacks.

    Returns
    -------
    list of dict
        A row for each rank; plain values.

    Raises
    ------
    ValueError
        If there is no such job here, or several fit.
    """
    chosen = _choose(_here(), job)
    if stacks:
        ask([one.path for one in chosen if one.alive])
        chosen = _again(chosen)
    now = time.time_ns()
    return [_row(one, now, stacks) for one in sorted(chosen, key=lambda one: one.rank)]


def _here() -> list[Recording]:
    try:
        paths: list[Path] = find(folder_of_user())
    except OSError:
        return []
    return list(_readable(paths))


def _again(recordings: list[Recording]) -> list[Recording]:
    return list(_readable([Path(one.path) for one in recordings]))


def _readable(paths: list[Path]) -> Iterator[Recording]:
    for path in paths:
        try:
            yield read(path)
        except (OSError, ValueError):
            continue  # it has just ended, or is of another version


def _choose(recordings: list[Recording], job: str | None) -> list[Recording]:
    if job is not None:
        named = {one.job for one in recordings if job in (one.job, str(one.pid), one.launch)}
    else:
        named = {one.job for one in recordings if one.alive}
    if not named:
        raise ValueError(
            f"no rank of {f'job {job}' if job else 'a running job'} of this user is on this node; "
            "--hosts names the nodes"
        )
    if len(named) > 1:
        listed = [
            f"  {one.job}: {one.size} ranks, {one.program}"
            for one in {one.job: one for one in recordings if one.job in named}.values()
        ]
        raise ValueError("several jobs fit; choose one by its digits:\n" + "\n".join(listed))
    return [one for one in recordings if one.job in named]


def _row(one: Recording, now: int, stacks: bool) -> dict[str, Any]:
    open_ = [operation for operation in one.operations if not operation.finished]
    last = one.operations[-1] if one.operations else None
    shown = open_[0] if open_ else last
    return {
        "job": one.job,
        "program": one.program,
        "size": one.size,
        "rank": one.rank,
        "host": one.host,
        "pid": one.pid,
        "alive": one.alive,
        "silent": max(0.0, (now - one.seen) / 1e9),
        "inside": bool(open_),
        "operation": str(shown) if shown else "",
        "state": (shown.failure or shown.state) if shown else "",
        "seconds": (now - _since(shown, bool(open_))) / 1e9 if shown else 0.0,
        "others": [str(operation) for operation in open_[1:]],
        "operations": last.number if last else 0,
        "bytes": {o.number: o.bytes for o in one.operations[-64:]},
        "stacks": one.stacks if stacks else "",
    }


def _since(shown: Operation, inside: bool) -> int:
    """When a rank entered its operation, or left it."""
    return shown.called if inside or shown.ended is None else shown.ended


# ---- other nodes ----


def remote_commands(options: argparse.Namespace) -> list[list[str]]:
    """Return the commands that show the ranks of other nodes, as JSON.

    Parameters
    ----------
    options : argparse.Namespace
        The command's.

    Returns
    -------
    list of list of str
        One per host; for a job of Slurm's one in all.
    """
    arguments = ["-m", "hpcdist", "top", *([options.job] if options.job else []), "--json"]
    own = [sys.executable, *arguments, *(["--stacks"] if options.stacks else [])]
    hosts = [host for host in options.hosts.split(",") if host]
    if hosts:
        return [[*shlex.split(options.ssh), host, shlex.join(own)] for host in hosts]
    if options.json or not (options.job and options.job.isdigit() and shutil.which("srun")):
        return []
    if _is_slurm_job(options.job):
        return [["srun", f"--jobid={options.job}", "--overlap", "--ntasks-per-node=1", "-l", *own]]
    return []


def _is_slurm_job(job: str) -> bool:
    if not shutil.which("squeue"):
        return False
    asked = subprocess.run(
        ["squeue", "-h", "-j", job], capture_output=True, text=True, timeout=_PATIENCE, check=False
    )
    return asked.returncode == 0 and bool(asked.stdout.strip())


def _everywhere(options: argparse.Namespace) -> list[dict[str, Any]]:
    commands = remote_commands(options)
    started = [
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )
        for command in commands
    ]  # fmt: skip
    missing = None
    rows = {}
    try:
        rows = {row["rank"]: row for row in rows_of(options.job, options.stacks)}
    except ValueError as error:
        missing = error
    for command, process in zip(commands, started, strict=True):
        for row in _answer(command, process):
            rows[row["rank"]] = row
    if not rows:
        raise missing or ValueError("no rank was found")
    return [rows[rank] for rank in sorted(rows)]


def _answer(command: list[str], process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """The rows that another node has sent; what it says besides goes to standard error."""
    try:
        out, err = process.communicate(timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
    found = []
    text = "\n".join(line.partition(": ")[2] if command[0] == "srun" else line
                     for line in out.splitlines())  # fmt: skip
    decoder = json.JSONDecoder()
    while text := text.lstrip():
        try:
            rows, end = decoder.raw_decode(text)
        except ValueError:
            break
        found += rows
        text = text[end:]
    if not found:
        where = command[-2] if command[0] != "srun" else "srun"
        print(f"hpcdist top: {where}: {err.strip() or 'no answer'}", file=sys.stderr)
    return found


# ---- text ----


def _lines(rows: list[dict[str, Any]], before: list[dict[str, Any]], stacks: bool) -> Iterator[str]:
    first = rows[0]
    yield f"job {first['job']}, {len(rows)} of {first['size']} ranks: {first['program']}"
    if len(rows) < first["size"]:
        yield "(the others are on other nodes: --hosts)"
    earlier = {row["rank"]: row for row in before}
    width = max(len(row["host"]) for row in rows)
    for row in rows:
        rate = _rate(row, earlier.get(row["rank"]))
        yield f"rank {row['rank']:>4} {row['host']:<{width}} {row['pid']:>7}{rate}  {_doing(row)}"
        for call in row["others"][:3]:
            yield f"{'':>12}also in {call}"
        if stacks and row["stacks"]:
            yield "\n".join(f"    {line}" for line in row["stacks"].splitlines())


def _doing(row: dict[str, Any]) -> str:
    if not row["alive"]:
        return f"has ended; last: {row['operation']}: {row['state']}"
    if not row["operation"]:
        text = "has called no operation yet"
    elif row["inside"]:
        text = f"is in {row['operation']} for {row['seconds']:.1f} s"
    else:
        text = f"is outside hpcdist for {row['seconds']:.1f} s; last: {row['operation']}"
        text += f": {row['state']}" if row["state"] != "done" else ""
    if row["silent"] > 2:
        text += f" (no sign of life for {row['silent']:.0f} s: stopped, or starved)"
    return text


def _rate(row: dict[str, Any], before: dict[str, Any] | None) -> str:
    """Operations and bytes since the last look, where there was one."""
    if before is None:
        return ""
    calls = row["operations"] - before["operations"]
    moved = sum(size for number, size in row["bytes"].items() if int(number) > before["operations"])
    more = "+" if calls > len(row["bytes"]) else ""
    return f" {calls:>7} calls {moved / 1e6:>9.3f}{more} MB"
