"""What ranks write as they crash: faulthandler's stacks, told in one line."""

from __future__ import annotations

import re

#: The first line of a crash; mpirun may have put dots of pytest in front of it.
BEGINS = re.compile(rb"Fatal Python error: |\*\*\* Process received signal \*\*\*")
#: What kind of crash it is: in Python's words, or in Open MPI's.
KIND = re.compile(r"(?:Fatal Python error|\] Signal): (.*)")
#: Lines of a crash that are kept: all stacks of two ranks with their threads.
LINES = 400
#: A line of a stack: file, line, function.
FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')
#: Frames that are told; below them is how pytest came to the test.
TOLD = 6


def of(lines: list[str]) -> str:
    """Return in one line what crashed where, innermost frame first; "" for no crash."""
    what, frames, current = "", [], False
    for line in lines:
        if not what and (found := KIND.search(line)):
            what = found[1].strip()
        if "most recent call first" in line:
            if frames:
                break
            current = "Current thread" in line
        elif current and (frame := FRAME.search(line)):
            frames.append(frame.groups())
    told = [f"{_short(file)}:{number} {name}" for file, number, name in frames[:TOLD]]
    if not any("/tests/" in file for file, _, _ in frames[:TOLD]):
        told += [f"{_short(f)}:{n} {name}" for f, n, name in frames if "/tests/" in f][:1]
    return " < ".join([what, *told]) if what else ""


def _short(file: str) -> str:
    """Return a file's name from the package or the tests on; else its last part."""
    return re.sub(r".*/(?=(?:hpcdist|tests)/[^/]*)|.*/(?=[^/]+$)", "", file, count=1)
