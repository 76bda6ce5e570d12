"""Each line of a rank's output is whole and has its rank in front."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import plain_environment
from mpis import OPEN_MPI

pytestmark = pytest.mark.jobs

#: As in printing.py.
LINES = 400
PROGRAM = str(Path(__file__).with_name("printing.py"))
#: What the launchers put in front: Open MPI's tags name the job, the rank and the stream.
FRONT = r"\[1,([01])\]<std(?:out|err)>: ?" if OPEN_MPI else r"\[([01])\] "


@pytest.mark.parametrize("unbuffered", ["1", ""])
@pytest.mark.parametrize("how", ["launch", "spawn"])
def test_lines_of_ranks_are_whole(how: str, unbuffered: str, tmp_path: Path) -> None:
    own = tmp_path / "sitecustomize.py"  # an environment's own still runs
    own.write_text("import sys; sys.own = True; print('own', 'is', 'here', file=sys.stderr)\n")
    command = ["-m", "hpcdist", "launch", "-n", "2", PROGRAM] if how == "launch" else [PROGRAM, how]
    done = subprocess.run(
        [sys.executable, *command],
        env=plain_environment(PYTHONUNBUFFERED=unbuffered, PYTHONPATH=str(tmp_path)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout
    # Open MPI adds a line's end where a process has written none
    said = [line for line in done.stdout.splitlines() if "rank " in line and "/rank.py" not in line]
    found: dict[tuple[int, str], list[int]] = {}
    for line in said:
        whole = re.fullmatch(FRONT + r"rank (\d) (line|error) (\d+) of x+ end", line)
        if whole is None:
            whole = re.fullmatch(
                FRONT + rf"rank (\d) has {unbuffered or ''} ?\S*{tmp_path} 0", line
            )
            assert whole and whole[1] == whole[2], line
        else:
            assert whole[1] == whole[2], line
            found.setdefault((int(whole[1]), whole[3]), []).append(int(whole[4]))
    assert found == {
        (rank, name): list(range(LINES)) for rank in range(2) for name in ("line", "error")
    }
    assert done.stdout.count("own is here") >= 2
