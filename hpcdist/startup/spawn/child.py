"""The program of each process of :func:`hpcdist.spawn`: it runs the function, records the end."""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import time
import traceback
from multiprocessing import spawn as mp_spawn
from pathlib import Path
from typing import Any

from hpcdist import launchers
from hpcdist.launchers import variables
from hpcdist.startup import steps

#: True while a child imports the parent's main module: an unguarded spawn() there is refused.
importing = False


def main() -> None:
    """Entry point: ``folder`` and, without a launcher, ``rank size`` on the command line."""
    global importing
    folder = Path(sys.argv[1])
    rank = _without_launcher(folder) if len(sys.argv) > 2 else _with_launcher()
    with open(folder / "job", "rb") as file:
        job = pickle.load(file)
    try:
        importing = True
        mp_spawn.prepare(job["preparation"])
        importing = False
        function, arguments = pickle.loads(job["call"])
        function(rank, *arguments)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except SystemExit as leave:
        if leave.code not in (None, 0):
            code = leave.code if isinstance(leave.code, int) else 1
            _leave_word(folder, f"exit.{rank}", {"rank": rank, "pid": os.getpid(), "code": code})
        else:
            _leave_word(folder, f"well.{rank}", {})
        raise
    except BaseException as error:
        _tell(folder, rank, error)
        raise
    _leave_word(folder, f"well.{rank}", {})


def _with_launcher() -> int:
    launch = launchers.detect()
    if launch is None or launch.rank is None:
        raise RuntimeError("the launcher did not say which rank this process is")
    variables.export_launch(launch, os.environ)
    return launch.rank


def _without_launcher(folder: Path) -> int:
    rank, size = map(int, sys.argv[2:4])
    place = launchers.Launch("hpcdist.spawn", rank, size, rank, size, 1)
    variables.export_launch(place, os.environ)
    steps.set_default_method(f"file://{folder}/meeting?rank={rank}&world_size={size}")
    cpus = sorted(os.sched_getaffinity(0))
    share = len(cpus) // size
    if share < 2:  # the same rule as in hpcdist.launchers.commands
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    else:
        os.sched_setaffinity(0, cpus[rank * share : (rank + 1) * share])
    return rank


def _tell(folder: Path, rank: int, error: BaseException) -> None:
    """Write the exception for the parent; also the object, if it can be pickled."""
    word: dict[str, Any] = {
        "rank": rank,
        "pid": os.getpid(),
        "time": time.time(),
        "type": type(error).__name__,
        "traceback": "".join(traceback.format_exception(type(error), error, error.__traceback__)),
    }
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
        (folder / f"exception.{rank}").write_bytes(data)
    except Exception:
        pass  # its text is enough
    _leave_word(folder, f"error.{rank}", word)


def _leave_word(folder: Path, name: str, word: dict[str, Any]) -> None:
    """Write a file atomically."""
    partial = folder / f".{name}"
    partial.write_text(json.dumps(word))
    partial.rename(folder / name)
