"""What the person at the keyboard asked the installer for.

PEP 517 tells a backend which project to build, not which extras were named, yet on a machine
without MPI the extra decides which MPI to build against. The installer's own command line has
it: ``pip install ".[mpich]"`` is the parent process.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from hpcdist_build.mpicc import WHEELS

# backend <- pip is one step, backend <- wrapper script <- pip two.
_MAX_ANCESTORS = 3

_ARGUMENT = re.compile(r"(?P<base>[^\[\]]*)\[(?P<extras>[\w\s,.-]*)\][^\[\]]*")


def requested_extra(project: str | os.PathLike[str] = ".") -> str | None:
    """The extra of `mpicc.WHEELS` when an installer above us was asked for that extra of ours.

    Parameters
    ----------
    project : path-like
        The source folder being built.

    Returns
    -------
    str or None
        None when nothing is asked for, several are, or there is no /proc to look into.
    """
    pid = os.getpid()
    for _ in range(_MAX_ANCESTORS):
        pid = _parent(pid)
        if pid <= 1:
            break
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            folder = os.readlink(f"/proc/{pid}/cwd")
        except OSError:
            break
        extra = extra_in(words, folder, project)
        if extra is not None:
            return extra
    return None


def extra_in(words: list[str], folder: str, project: str | os.PathLike[str] = ".") -> str | None:
    """The MPI extra named in one command line.

    Parameters
    ----------
    words : list of str
        The command line, split.
    folder : str
        The working directory its relative paths start from.
    project : path-like
        The source folder being built; other projects' extras do not count.

    Returns
    -------
    str or None
        ``openmpi``, ``mpich`` or ``impi``; None if none or several are named.
    """
    found = set()
    for word in words:
        match = _ARGUMENT.fullmatch(word)
        if match and _is_ours(match["base"].strip(), folder, project):
            found |= {extra.strip().lower() for extra in match["extras"].split(",")}
    named = found.intersection(WHEELS)
    return named.pop() if len(named) == 1 else None


def _is_ours(base: str, folder: str, project: str | os.PathLike[str]) -> bool:
    """Whether what stands before the bracket is this project: by name, archive or folder."""
    if re.fullmatch(r"hpcdist(-[\w.]+\.tar\.gz)?", os.path.basename(base)):
        return True
    try:
        return os.path.samefile(os.path.join(folder, base), project)
    except OSError:
        return False


def _parent(pid: int) -> int:
    """A process's parent, 0 when unknown."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    # The second field is the program's name in parentheses and may itself hold blanks.
    return int(stat.rpartition(")")[2].split()[1])
