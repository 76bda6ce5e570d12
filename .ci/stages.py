#!/usr/bin/env python3
"""The long stages of CI: what each runs, the files it depends on, and which have passed on them.

    .ci/stages.py list                    every stage, with what passed.json says of it
    .ci/stages.py due                     those that have not passed on these files, a line each,
                                          first the one that has not passed for the longest time
    .ci/stages.py waits NAME --left S     why a stage that is due does not run with so many seconds
                                          left; nothing if it runs
    .ci/stages.py show NAME [--seed N]    three lines: environment, seconds at most, command
    .ci/stages.py passed NAME --seconds S --seed N    note that a stage has passed on these files

A stage that has passed on the very files it depends on need not run again: `.ci/long` notes that in
.ci/passed.json, and `.ci/run` runs what is due. After a change of the engine that is nearly all,
three hours on two slow cores, and a change has to land in less. So `.ci/run` leaves out what no
longer fits, and says so; but not what last passed more than three days ago: before anything lands,
that has to pass. It needs git and Python, nothing else.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import hashlib
import json
import random
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

import kinds  # noqa: E402

PASSED = ROOT / ".ci" / "passed.json"

#: Days after its last pass in which a stage that is due may wait for a run that has time for it.
WAITS = 3
#: So many times its last seconds, and a minute, may a stage need on another machine.
SLOWER = 1.25

#: What every stage depends on that has an environment: how it is made, and what builds hpcdist.
BUILD = (
    ".ci/environments",
    ".ci/packages",
    "setup.py",
    "pyproject.toml",
    "MANIFEST.in",
    "_build/*",
)
#: What hpcdist is made of.
PACKAGE = (*BUILD, "hpcdist/*", "pyx/*")
#: What every run of tests/run.py depends on.
RUNNER = ("tests/run.py", "tests/conftest.py", "tests/support/*")
#: What tests/run.py starts may use these. The folders that are left out have stages of their own.
TESTS = ("tests/*", "!tests/model/*", "!tests/scale/*", "!tests/stress/*")
#: The C files without the Cython on top.
ENGINE = (
    "pyx/hpcdist/*.h",
    "pyx/hpcdist/engine/*.[ch]",
    "pyx/hpcdist/kernels/*",
    "pyx/hpcdist/store/*",
)


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes
    ----------
    environment : str
        ``tools`` (Debian's packages), ``openmpi``, ``mpich`` or ``newest``; `.ci/common` makes it.
    command : str
        For bash, in the repository's root; ``{seed}`` is a number below 2^31.
    limit : int
        Seconds.
    files : tuple of str
        Patterns of files from the root; ``*`` matches slashes too, ``!`` takes files out.
    marks : tuple of str
        Of the files of tests that the patterns match, those with one of these marks count; all if
        there are none. `.ci/run` itself runs each file that is not rare.
    """

    name: str
    environment: str
    command: str
    limit: int
    files: tuple[str, ...]
    marks: tuple[str, ...] = ()


#: The rooms of tests that .ci/sanitized runs.
SANITIZED = ("backends", "collectives", "engine", "kernels", "launchers", "startup", "store")
#: With MPICH after Open MPI: not what takes minutes and has nothing of the MPI in it.
NOT_WITH_MPICH = (
    "test_bridge or test_conformance or test_suites or test_chaos or test_training_starts"
)
#: The rooms of tests of which those that are rare are PyTorch's own, or run its own programs.
SUITES = ("tests/conformance", "tests/torch")
#: What a newer torch can break.
NEWEST = (
    "tests/torch/test_compat.py",
    "tests/torch/test_bridge.py",
    "tests/conformance",
    "tests/backends/nccl",
    "tests/backends/cuda_over_mpi",
)

STAGES = (
    Stage(
        "models",
        "tools",
        "python3 tests/model/run.py",
        900,
        ("tests/model/*", "pyx/hpcdist/engine/*.[ch]"),
    ),
    Stage(
        "stress",
        "tools",
        "python3 tests/stress/run.py --seed {seed}",
        900,
        ("tests/stress/*", *ENGINE),
    ),
    Stage(
        "scale",
        "openmpi",
        "python tests/scale/run.py --short",
        300,
        ("tests/scale/*", *ENGINE),
    ),
    Stage(
        "aarch64",
        "openmpi",
        "python tests/stress/cross.py",
        600,
        (*BUILD, "pyx/*", "tests/stress/cross.py"),
    ),
    Stage(
        "sanitized",
        "openmpi",
        ".ci/sanitized",
        1200,
        (
            *BUILD,
            "pyx/*",
            ".ci/sanitized",
            *RUNNER,
            "tests/groups/reconfigurations.py",
            "tests/groups/windows/*",
            *(f"tests/{room}/*" for room in SANITIZED),
        ),
    ),
    # The rest depends on all of hpcdist. PyTorch's own suites, and its programs over the bridge.
    Stage(
        "suites",
        "openmpi",
        f"HPCDIST_TEST_SEED={{seed}} python tests/run.py --only-rare {' '.join(SUITES)}",
        1800,
        (*PACKAGE, *RUNNER, *(f"{room}/*" for room in SUITES)),
        ("rare",),
    ),
    # Slurm, endings, nodes that fail, restarts, chaos, the examples to their last epoch.
    Stage(
        "rare",
        "openmpi",
        f"HPCDIST_TEST_SEED={{seed}} python tests/run.py --only-rare --without {' '.join(SUITES)}",
        2700,
        (*PACKAGE, *TESTS, *(f"!{room}/*" for room in SUITES), "examples/*", "jobscripts/*"),
        ("rare",),
    ),
    Stage(
        "mpich",
        "mpich",
        "HPCDIST_TEST_SEED={seed} python tests/run.py --all --mpi-part --kinds jobs"
        f' -k "not ({NOT_WITH_MPICH})"',
        1800,
        (*PACKAGE, *TESTS, "examples/*", "jobscripts/*"),
        ("jobs",),
    ),
    # Every test of ranks, as on two nodes of two.
    Stage(
        "nodes",
        "openmpi",
        "HPCDIST_NODES=2 HPCDIST_TEST_SEED={seed} python tests/run.py --all --np 4 --kinds ranks"
        " --without tests/parallel",
        1800,
        (*PACKAGE, *TESTS, "!tests/parallel/*"),
        ("ranks",),
    ),
    Stage(
        "parallel",
        "openmpi",
        "HPCDIST_NODES=2 HPCDIST_TEST_SEED={seed} python tests/run.py tests/parallel --all --np 4"
        " --kinds ranks",
        1800,
        (*PACKAGE, *RUNNER, "tests/parallel/*"),
        ("ranks",),
    ),
    Stage(
        "impi",
        "openmpi",
        "python tests/matrix.py --torch 2.13 --mpi impi --parts training short",
        1200,
        (
            *PACKAGE,
            *RUNNER,
            "tests/matrix.py",
            "tests/collectives/*",
            "tests/groups/*",
            "tests/engine/test_agreement.py",
            "tests/test_l*.py",
            "examples/train_digits.py",
        ),
    ),
    Stage(
        "newest",
        "newest",
        f"HPCDIST_TEST_SEED={{seed}} python tests/run.py {' '.join(NEWEST)} --all --np 2"
        ' -k "not test_without_mpi and not test_endings"',
        1800,
        (
            *PACKAGE,
            *RUNNER,
            ".ci/newest.txt",
            "tests/torch/bridge*.py",
            *(f"{place}*" for place in NEWEST),
        ),
    ),
)  # fmt: skip


def tracked() -> list[str]:
    """Return the files of the repository, those that are not committed yet among them."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return sorted(name for name in set(done.stdout.split("\0")) if (ROOT / name).is_file())


def matching(patterns: Sequence[str], names: Iterable[str]) -> list[str]:
    """Return the names that one of the patterns matches, and none of those after a ``!``."""

    def fits(name: str, left_out: bool) -> bool:
        fitting = [one.lstrip("!") for one in patterns if one.startswith("!") is left_out]
        return any(fnmatch.fnmatchcase(name, one) for one in fitting)

    return [name for name in names if fits(name, False) and not fits(name, True)]


def depends(stage: Stage, names: Iterable[str]) -> list[str]:
    """Return the names of the files that a stage depends on."""
    found = matching(stage.files, names)
    if not stage.marks:
        return found
    return [name for name in found if not is_test(name) or set(stage.marks) & marks(name)]


def is_test(name: str) -> bool:
    """Whether a file holds tests, and not what they share."""
    return fnmatch.fnmatchcase(name, "tests/*/test_*.py")


def marks(name: str) -> set[str]:
    """Return the marks of a file of tests; none if it is not there."""
    return set(kinds.marks(ROOT / name)) if (ROOT / name).exists() else set()


def digest(stage: Stage, names: list[str]) -> str:
    """Return a number for the command and the text of all files that a stage depends on."""
    found = hashlib.sha256(f"{stage.environment}\n{stage.command}\n".encode())
    for name in depends(stage, names):
        found.update(name.encode() + b"\0" + hashlib.sha256((ROOT / name).read_bytes()).digest())
    return found.hexdigest()[:32]


def read() -> dict[str, dict]:
    """Return what passed.json says, by stage."""
    return json.loads(PASSED.read_text()) if PASSED.exists() else {}


def write(passed: dict[str, dict]) -> None:
    """Write passed.json: a line for each stage, so that two changes seldom meet."""
    lines = [f"{json.dumps(name)}: {json.dumps(passed[name])}" for name in sorted(passed)]
    PASSED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def has_passed(stage: Stage, names: list[str]) -> bool:
    return read().get(stage.name, {}).get("files") == digest(stage, names)


def passed_on(stage: Stage) -> datetime.date:
    """Return the day on which a stage last passed, on whatever files; long ago if it never has."""
    return datetime.date.fromisoformat(read().get(stage.name, {}).get("date", "0001-01-01"))


def today() -> datetime.date:
    return datetime.datetime.now(datetime.timezone.utc).date()


def due(names: list[str]) -> list[Stage]:
    """Return the stages that have not passed on these files, the one that waits longest first."""
    return sorted((s for s in STAGES if not has_passed(s, names)), key=passed_on)


def waits(stage: Stage, left: float) -> str:
    """Return why a stage does not run where so many seconds are left; "" if it runs."""
    until = passed_on(stage) + datetime.timedelta(days=WAITS)
    if today() > until:
        return ""
    noted = read()[stage.name]
    needs = noted["seconds"] * SLOWER + 60
    if needs <= left:
        return ""
    return (
        f"{stage.name} is due and was not run: it may need {needs:.0f} s, {max(left, 0):.0f} s "
        f"were left. It last passed on {noted['date']} and has to run after {until}: .ci/long"
    )


def stage_of(name: str) -> Stage:
    for stage in STAGES:
        if stage.name == name:
            return stage
    raise argparse.ArgumentTypeError(
        f"no stage {name!r}; there are {', '.join(s.name for s in STAGES)}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog=".ci/stages.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="what", required=True)
    commands.add_parser("list")
    commands.add_parser("due")
    show = commands.add_parser("show")
    passed = commands.add_parser("passed")
    wait = commands.add_parser("waits")
    wait.add_argument("stage", type=stage_of)
    wait.add_argument("--left", type=float, required=True)
    for command in (show, passed):
        command.add_argument("stage", type=stage_of)
        command.add_argument("--seed", type=int, default=random.randrange(1 << 31))
    passed.add_argument("--seconds", type=int, required=True)
    options = parser.parse_args()
    names = tracked()
    if options.what == "show":
        stage = options.stage
        print(stage.environment, stage.limit, stage.command.format(seed=options.seed), sep="\n")
    elif options.what == "passed":
        noted = {
            "files": digest(options.stage, names),
            "date": f"{today()}",
            "seconds": options.seconds,
            "seed": options.seed,
        }
        write({**read(), options.stage.name: noted})
    elif options.what == "waits":
        print(end=waits(options.stage, options.left))
    elif options.what == "due":
        print(*(stage.name for stage in due(names)), sep="\n")
    else:
        for stage in STAGES:
            noted = read().get(stage.name)
            state = "due" if not has_passed(stage, names) else "passed on these files"
            last = f", last passed {noted['date']} in {noted['seconds']} s" if noted else ""
            print(f"{stage.name:<10} {len(depends(stage, names)):4} files  {state}{last}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
