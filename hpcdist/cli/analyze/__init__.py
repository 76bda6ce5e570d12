"""Find out from the flight recorders of a job where its ranks diverged and what they waited for.

DIR has the recorders' files: the folder HPCDIST_DUMP of a job, its folder /dev/shm/hpcdist.UID on a
node, or files of several nodes copied together. The text names the first divergence, the ranks that
were late and by how much, and time and bandwidth per rank and operation.
"""

from __future__ import annotations

import argparse
import json
import pickle
import sys
from pathlib import Path

from hpcdist.recordings import Recording, as_frtrace, find, read
from hpcdist.recordings.analysis import analysis, divergences, lines, page, timeline

from .trace import merged

__all__ = ["add_arguments", "load", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to a parser."""
    parser.add_argument("dir", type=Path, help="folder of the recorders' files, or one of them")
    parser.add_argument("--job", help="the job's eight digits, if there are several in DIR")
    parser.add_argument("--json", action="store_true", help="print JSON in place of text")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with a timeline")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write a trace for Perfetto (.gz compresses it)"
    )
    parser.add_argument(
        "--profiles", type=Path, nargs="+", default=[], metavar="TRACE",
        help="with --trace: the profiler's trace of each rank, rank 0 first, to put beside it",
    )  # fmt: skip
    parser.add_argument(
        "--frtrace", metavar="PREFIX", help="write PREFIX0, PREFIX1, ... for torchfrtrace"
    )


def run(options: argparse.Namespace) -> int:
    """Analyze; 1 if nothing can be read or written, 3 if the ranks diverged."""
    if options.profiles and not options.trace:
        print("hpcdist analyze: --profiles needs --trace FILE, which takes them", file=sys.stderr)
        return 2
    try:
        recordings, notes = load(options.dir, options.job)
        for note in notes:
            print(f"hpcdist analyze: {printable(note)}", file=sys.stderr)
        found = analysis(recordings)
        if options.html:
            options.html.write_text(page(found, timeline(recordings)), encoding="utf-8")
        if options.trace:
            merged(options.trace, recordings, options.profiles)
        if options.frtrace is not None:
            for recording in recordings:
                with open(f"{options.frtrace}{recording.rank}", "wb") as file:
                    pickle.dump(as_frtrace(recording), file)
    except (OSError, ValueError) as error:
        print(f"hpcdist analyze: {printable(str(error))}", file=sys.stderr)
        return 1
    text = json.dumps(found, indent=1) if options.json else printable("\n".join(lines(found)))
    print(text)
    return 3 if divergences(recordings) else 0


def printable(text: str) -> str:
    """Return a text without what a terminal obeys: a recorder's names may be another user's.

    Parameters
    ----------
    text : str
        Lines.
    """
    return "".join(
        each if each.isprintable() or each in "\n\t" else each.encode("unicode_escape").decode()
        for each in text
    )


def load(place: Path, job: str | None) -> tuple[list[Recording], list[str]]:
    """Read the recorders of one job.

    Parameters
    ----------
    place : Path
        Folder or file.
    job : str, optional
        Its eight digits; by default the one that was seen last.

    Returns
    -------
    list of Recording, list of str
        In the order of ranks, one per rank; what the user should know.

    Raises
    ------
    OSError
        If the folder cannot be read.
    ValueError
        If there is no such file.
    """
    notes: list[str] = []
    jobs: dict[str, dict[int, Recording]] = {}
    for path in find(place):
        try:
            one = read(path)
        except (OSError, ValueError) as error:
            notes.append(str(error))
            continue
        ranks = jobs.setdefault(one.job, {})
        if one.rank not in ranks or ranks[one.rank].seen < one.seen:
            ranks[one.rank] = one
    if job is not None and job not in jobs:
        raise ValueError(f"{place} has no file of job {job}; it has: {', '.join(jobs) or 'none'}")
    if not jobs:
        raise ValueError(f"{place} has no file of hpcdist's flight recorder")
    newest = job or max(jobs, key=lambda name: max(one.seen for one in jobs[name].values()))
    if len(jobs) > 1 and job is None:
        others = ", ".join(sorted(set(jobs) - {newest}))
        notes.append(f"{place} has files of several jobs: this is {newest}; --job takes {others}")
    return [jobs[newest][rank] for rank in sorted(jobs[newest])], notes
