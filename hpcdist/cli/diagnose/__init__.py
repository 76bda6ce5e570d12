"""Report what hpcdist runs on here, what is wrong with it, and how to fix it.

Alone it looks at this host. Under the launcher, as mpirun -n 4 python -m hpcdist diagnose, all
ranks look, differences between them are found, and two seconds of all_reduce are judged against
what memory and links allow. The exit status is 1 if there is a fault, else 0.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from hpcdist import _engine, hardware, launchers
from hpcdist.collectives.objects import all_gather_object, broadcast_object_list, gather_object
from hpcdist.errors import DistError
from hpcdist.groups.state import get_rank, get_world_size, is_initialized
from hpcdist.startup.destroy import destroy_process_group
from hpcdist.startup.init import init_process_group

from ..numbers import seconds
from . import binding, build, gpu, infiniband, launcher, memory, reduce, report, settings, whole
from .section import FAULT, WARNING, Place, Section

__all__ = ["add_arguments", "local", "run"]

#: Seconds after the group's own timeout, which names who is missing, until a rank ends itself.
_GRACE = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to a parser."""
    parser.add_argument("--json", action="store_true", help="print JSON: see docs/diagnose.md")
    parser.add_argument(
        "--no-run",
        action="store_true",
        help="look only: do not start MPI, import no torch, measure nothing (for login nodes)",
    )
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=60.0,
        metavar="S",
        help="seconds for each of: starting MPI, asking the ranks, measuring (default: 60)",
    )


def local(place: Place) -> list[Section]:
    """Run all checks of this process; one that raises becomes a finding."""
    family = launchers.mpi_family(_engine.library_version())
    checks: dict[str, Callable[[], Section]] = {
        "build": lambda: build.collect(place),
        "launcher": lambda: launcher.collect(place),
        "binding": lambda: binding.collect(place, family),
        "memory": lambda: memory.collect(place),
        "infiniband": lambda: infiniband.collect(place),
        "settings": lambda: settings.collect(place),
        "gpu": lambda: gpu.collect(place),
    }
    sections = []
    for name, check in checks.items():
        try:
            sections.append(check())
        except Exception as error:
            section = Section(name, name)
            section.find(
                WARNING,
                f"this check failed: {type(error).__name__}: {error}",
                "please report it, with this text and the output of python -m hpcdist diagnose "
                "--json",
            )
            sections.append(section)
    return sections


class _Output:
    """Prints the one report of this process, or says in a line on standard error what is wrong.

    Parameters
    ----------
    first : bool
        Whether this is the rank that prints reports.
    form : callable
        Report to text.
    """

    def __init__(self, first: bool, form: Callable[[dict[str, Any]], str]) -> None:
        self.first = first
        self._form = form
        self._lock = threading.RLock()
        self._done = False

    def report(self, whole: dict[str, Any]) -> int:
        """Print it unless there was one, and return the exit status."""
        with self._lock:
            if not self._done:
                self._done = True
                print(self._form(whole), flush=True)
        return report.status(whole)

    def alone(self, sections: list[Section]) -> int:
        """Print what this rank found without the others."""
        if self.first and not self._done:
            return self.report(_alone(sections))
        faults = [f for section in sections for f in section.findings if f["severity"] == FAULT]
        who = f"hpcdist diagnose, process {os.getpid()} on {socket.gethostname()}"
        for fault in faults:
            what = fault["what"].rstrip(".")
            print(f"{who}: {what}. fix: {fault['fix']}", file=sys.stderr, flush=True)
        return int(bool(faults))


class _Watch:
    """Ends the process with the results so far if a phase takes too long."""

    def __init__(self, output: _Output) -> None:
        self._output = output
        self._changed = threading.Condition()
        self._phase = ""
        self._end: float | None = None
        self.sections: list[Section] = []
        threading.Thread(target=self._main, name="diagnose-watch", daemon=True).start()

    def phase(self, what: str, seconds: float) -> None:
        """Begin a phase with this time limit."""
        with self._changed:
            self._phase, self._end = what, time.monotonic() + seconds
            self._changed.notify()

    def _main(self) -> None:
        with self._changed:
            while self._end is None or (left := self._end - time.monotonic()) > 0:
                self._changed.wait(None if self._end is None else left)
            phase = self._phase
        what = f"{phase} took too long on {socket.gethostname()}: see --timeout"
        self._output.alone([*self.sections, _broken(what)])
        if _engine.mpi_state() == "up":
            _engine.abort(1, "")
        os._exit(1)


def _broken(what: str) -> Section:
    section = Section("start", "Start")
    section.find(FAULT, what, _advice())
    return section


def run(options: argparse.Namespace) -> int:
    """Print the report; 1 if it has a fault."""
    place = Place(cpus=hardware.allowed_cpus())
    output = _Output(_first(place), report.as_json if options.json else report.as_text)
    if options.no_run:
        return output.alone(local(place))
    watch = _Watch(output)
    watch.sections = local(place)
    watch.phase("starting MPI (a rank has not arrived, or the hosts do not reach each other)",
                options.timeout)  # fmt: skip
    try:
        init_process_group("mpi", timeout=timedelta(seconds=options.timeout))
        return _together(place, watch, options.timeout, output)
    except (DistError, ValueError, TypeError) as error:
        started = is_initialized()
        what = "the ranks do not answer" if started else "hpcdist does not start"
        # MPI cannot be ended in order where a rank is missing; the watch ends a process that tries
        watch.phase("ending", _GRACE)
        return output.alone([*watch.sections, _broken(f"{what}: {error}")])


def _together(place: Place, watch: _Watch, timeout: float, output: _Output) -> int:
    """Under MPI: ask all ranks, measure, print on rank 0."""
    place.running = True
    rank, size = get_rank(), get_world_size()
    # the group's own timeout comes first: it names who is missing
    watch.phase("asking the ranks", timeout + _GRACE)
    offer = memory.Offer()
    offers: list[Any] = [None] * size
    all_gather_object(offers, offer.address())
    place.sibling = memory.sibling_of(offers, rank)
    watch.sections = local(place)
    mine = {
        "rank": rank,
        "host": socket.gethostname(),
        "machine": os.cpu_count() or 1,
        "cpus": sorted(place.cpus),
        "link": infiniband.rate_of(infiniband.ports(place)) or whole.ethernet(place),
        "sections": [section.plain() for section in watch.sections],
    }
    parts: list[Any] = [None] * size
    watch.phase("asking the ranks", timeout + _GRACE)
    gather_object(mine, parts if rank == 0 else None, 0)
    measured = None
    if size > 1:
        watch.phase("two seconds of all_reduce", timeout + _GRACE)
        measured = reduce.measure()
    del offer  # every rank has passed here, so none reads it any more
    code = [0]
    if rank == 0:
        merged = report.merge(parts)
        whole.judge(merged, parts, measured)
        code = [output.report(merged)]
    watch.phase("ending", timeout + _GRACE)
    broadcast_object_list(code, 0)
    destroy_process_group()
    watch.phase("ending", timeout + _GRACE)
    return code[0]


def _alone(sections: list[Section]) -> dict[str, Any]:
    part = {"rank": 0, "host": socket.gethostname(), "sections": [s.plain() for s in sections]}
    return report.merge([part])


def _first(place: Place) -> bool:
    """Return whether this is the rank that prints, according to the launcher."""
    try:
        launch = launchers.detect(place.env)
    except ValueError:
        return True
    return launch is None or not launch.rank


def _advice() -> str:
    found = launchers.find()
    if found is None:
        return "start it with mpirun -n N python -m hpcdist diagnose"
    family = launchers.mpi_family(_engine.library_version())
    return (
        "check whether the same command with hostname in place of python returns from every host, "
        f"whether all of them have this environment, and whether {found.name} belongs to {family}, "
        "which hpcdist runs on here"
    )
