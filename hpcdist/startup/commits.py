"""Where a job keeps commits that outlive its processes: hpcdist.elastic writes them there."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from hpcdist import _engine, config
from hpcdist.recordings.read import folder_of_user
from hpcdist.startup.apart import stat_of

#: HPCDIST_COMMIT_JOB of this process, once it is in a process group.
_named = ""


def job_of_this_process(environ: Mapping[str, str] | None = None) -> str:
    """Return the name under which this process's job keeps commits; "" if it keeps none.

    Parameters
    ----------
    environ : mapping, optional
        Read instead of ``os.environ``.
    """
    env = os.environ if environ is None else environ
    named = str(config.get("commit_job", env)) or (_named if environ is None else "")
    if named:
        return re.sub(r"[^\w.-]", "_", named)[:100]
    restarts = env.get("TORCHELASTIC_MAX_RESTARTS", "")
    if not (restarts.isdecimal() and int(restarts)):
        return ""
    # The agent lives as long as the job does on this node, and a run's id may be used again.
    agent = os.getppid()
    stat = stat_of(agent)
    return f"torchrun-{agent}-{stat[19] if stat else 0}"


def folder_of_job(job: str) -> Path:
    """Return a job's folder on this node."""
    return folder_of_user() / f"commits-{job}"


def expect_end(comm: _engine.Comm | None, rank: int) -> None:
    """Let the last rank of the node that ends well remove the job's folder; local.

    `rank` is this process's among all that end.

    A job that this process starts is another one: it does not inherit the name.
    """
    global _named
    _named = os.environ.pop(config.option("commit_job").variable, "") or _named
    job = job_of_this_process()
    if job and comm is not None:
        here = _engine.ranks_of_machine(comm)
        _engine.mark_end(str(folder_of_job(job)), rank, here)
