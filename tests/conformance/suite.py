"""Run PyTorch's own test suite of a distributed backend, inside the ranks of an MPI job.

``run.py`` starts this; by hand it is

    mpirun -n 4 python suite.py bridge --only test_all_reduce_sum --verbose

The suite starts processes by itself; here the ranks of a job take their place, and every test gets
a fresh default group. All ranks run the same tests in the same order. After each one they compare
outcomes, so that one line of the report stands for all. A test that does not end is ended with the
job, with the stacks of all ranks; ``run.py`` goes on with the next one.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import os
import re
import shutil
import sys
import tempfile
import time
import traceback
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from on_cpu import OnCpu, pretend
from sides import SIDES, Side

#: Reasons for which the suite holds a test back that speak of another backend, or of NCCL where the
#: test itself uses nothing of NCCL's.
HELD_BACK = re.compile(
    r"Test requires backend \w+ to be one of"
    r"|GLOO Batch Send Recv CPU"
    r"|Only [Gg]loo backend supports"
    r"|Only Nccl & Gloo backend support DistributedDataParallel"
    r"|Only (Nccl|NCCL) supports"
    r"|Only Gloo and (Nccl|NCCL) backends"
    r"|Only MPI supports (CPU )?all_to_all"
    r"|MPI doesn't support GPU barrier"
    r"|NCCL (Batch )?Send Recv Only"
    r"|Need NCCL|c10d was not compiled with the NCCL backend"
    r"|Coalescing manager currently tests with NCCL only"
    r"|https://github.com/pytorch/pytorch/(issues|pull)/"
    r"|Skipped due to flakiness"
)
#: Tests held back for a GPU or for NCCL of which they use nothing, or for a bug of another backend,
#: and the ranks they need: they are run without their guards.
FREED = {
    "test_barrier_timeout_arg": 2,
    "test_batch_isend_irecv_op_list_err": 2,
    "test_broadcast_object_list": 2,
    "test_ddp_hook_pickling_powerSGD": 2,
    "test_ddp_profiling_autograd_profiler": 2,
    "test_ddp_sync_bn_training_vs_eval": 2,
    "test_new_subgroups": 4,
    "test_new_subgroups_by_enumeration_input_rank_exceeds_world_size": 4,
    "test_new_subgroups_by_enumeration_negative_input_rank": 2,
    "test_new_subgroups_group_size_exceeds_world_size": 2,
    "test_new_subgroups_overlap_not_allowed": 4,
    "test_new_subgroups_world_size_not_divisible_by_group_size": 4,
}
#: Tests that take minutes on a CPU, and why.
TOO_LARGE = {"test_ddp_uneven_inputs": "trains a convolution of 1000 x 1000 pixels 126 times"}
#: Tests of a group of ranks 1 and 2. The suite skips them for few ranks by itself, but not for MPI.
THREE_RANKS = re.compile(r"(?<!full)_group(_|$)|_failure_order$")
#: Tests that the suite skips below eight ranks, but not for MPI; gloo gets them from three on, too.
EIGHT_RANKS = re.compile(r"_group(_|$)|_failure_order$|_no_rank_zero|_wait_all_ranks$")
#: Seconds for one test; the slowest but those of SLOWER takes six.
DEADLINE = 60.0
#: Tests that have a multiple of it: torch's default compiler takes a minute on busy cores, the
#: older versions' longer.
SLOWER = {"test_ddp_compile_static_graph": 5}
#: Timeout of the default groups, seconds.
TIMEOUT = 20.0
#: Bytes of what a rank tells the others about a test.
TEXT = 4000


def say(text: str) -> None:
    """Print in one piece."""
    os.write(1, f"{text}\n".encode())


def prepare(label: str, size: int, folder: Path) -> None:
    """Set what the suite reads from the environment, when it is imported and later."""
    for name in ("barrier", "test_dir", "init_dir"):
        (folder / name).mkdir(exist_ok=True)
    os.environ.update(
        BACKEND=label,
        WORLD_SIZE=str(size),
        TEMP_DIR=str(folder),
        INIT_METHOD=f"file://{folder}/init_dir/shared",
        PYTORCH_PRINT_REPRO_ON_FAILURE="0",
    )


class Agreement:
    """What the ranks tell each other between tests, apart from the groups under test."""

    def __init__(self) -> None:
        from hpcdist import _engine

        self.comm = _engine.Comm.world("conformance", 4 * DEADLINE, 1)
        self.rank, self.size = self.comm.rank, self.comm.size

    def texts(self, text: str) -> list[str]:
        """Give every rank's text, cut at its end if it is long."""
        own = np.zeros(TEXT, np.uint8)
        data = text.encode()[:TEXT]
        own[: len(data)] = np.frombuffer(data, np.uint8)
        out = np.empty(TEXT * self.size, np.uint8)
        self.comm.all_gather_into_tensor(out, own, api="conformance")
        parts = out.reshape(self.size, TEXT)
        return [part.tobytes().rstrip(b"\0").decode(errors="replace") for part in parts]


def build(side: Side, size: int, rank: int, folder: Path) -> type[unittest.TestCase]:
    """Import the suite and make the class whose tests are run."""
    import torch.distributed as dist
    from torch.testing._internal import common_distributed as common
    from torch.testing._internal.common_utils import TestCase

    if side.label == "mpi":
        for feature in ("ddp", "subgroup", "plugin", "gpu", "cuda"):
            common.DistTestCases.backend_feature[feature].add("mpi")
        common.DistTestCases.skip_collective["allgather_coalesced"].discard("mpi")
        dist.is_mpi_available = lambda: True
    into = pretend(common, size) if side.pretends else None
    from torch.testing._internal.distributed import distributed_test as suite

    class Conformance(TestCase, suite.DistributedTest._DistTestBase):  # type: ignore[misc]
        world_size = str(size)
        file_name = str(folder / "init_dir" / "file")
        init_method = f"file://{folder}/init_dir/shared"

        def setUp(self) -> None:
            super().setUp()
            self.rank = rank
            suite.Barrier.barrier_id = 0
            self.skip_return_code_checks: list[object] = []

        def assertRaisesRegex(  # noqa: N802
            self, error: Any, expected: Any, *args: Any, **kw: Any
        ) -> Any:
            return super().assertRaisesRegex(*side.expected(error, expected), *args, **kw)

        def assertRaises(self, error: Any, *args: Any, **kw: Any) -> Any:  # noqa: N802
            return super().assertRaises(side.expected(error)[0], *args, **kw)

    for name in names(Conformance):
        method = getattr(Conformance, name)
        if side.pretends and size >= FREED.get(name, size + 1):
            method = inspect.unwrap(method)
            release(method)
            setattr(Conformance, name, method)
        elif side.pretends and HELD_BACK.search(getattr(method, "__unittest_skip_why__", "")):
            release(method)
    side.furnish(suite, common)
    if into is not None:
        into(suite, suite.DistributedDataParallel)
    return Conformance


def release(method: Callable[..., object]) -> None:
    """Take the mark off a test that says it is to be skipped."""
    layer: object = method
    while layer is not None:
        for mark in ("__unittest_skip__", "__unittest_skip_why__"):
            vars(layer).pop(mark, None)
        layer = getattr(layer, "__wrapped__", None)


def names(cls: type[unittest.TestCase]) -> list[str]:
    """Every test of the suite, in its order."""
    return list(unittest.TestLoader().getTestCaseNames(cls))


class Result(unittest.TestResult):
    """Takes the exit codes by which the suite skips a test for what they are."""

    def __init__(self, skips: dict[int, str]) -> None:
        super().__init__()
        self.codes = skips

    def addError(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        if err[0] is SystemExit and err[1].code in self.codes:
            self.addSkip(test, self.codes[err[1].code])
        else:
            super().addError(test, err)


def run_one(side: Side, case: unittest.TestCase, skips: dict[int, str]) -> tuple[str, str]:
    """Run one test in a group of its own: "passed", "skipped" or "failed", and why."""
    method = getattr(case, case._testMethodName)
    if case._testMethodName in TOO_LARGE:
        return "skipped", TOO_LARGE[case._testMethodName]
    if getattr(method, "__unittest_skip__", False):
        return "skipped", method.__unittest_skip_why__
    if os.environ["WORLD_SIZE"] == "2":
        if THREE_RANKS.search(case._testMethodName):
            os.environ["BACKEND"] = "hpcdist"
    elif EIGHT_RANKS.search(case._testMethodName):
        os.environ["BACKEND"] = "mpi"
    result = Result(skips)
    try:
        side.start(case._testMethodName, TIMEOUT)
        with OnCpu() if side.pretends else contextlib.nullcontext():
            case.run(result)
    except Exception:
        return "failed", traceback.format_exc()
    problems = result.errors + result.failures
    if problems:
        return "failed", problems[0][1]
    if result.skipped:
        return "skipped", result.skipped[0][1]
    return "passed", ""


def last_line(text: str) -> str:
    """The line that says what went wrong: the last that begins with an exception's name."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    for line in reversed(lines):
        if re.match(r"[\w.]*(Error|Exception|Exit)\b", line):
            return line
    return lines[-1] if lines else ""


def together(parts: list[str]) -> tuple[str, str, str]:
    """One outcome of what all ranks found: its kind, its reason in a line, and all that was said.

    A test that some ranks skip and others pass has been passed by those that it is about.
    """
    found = [part.split("\n", 1) for part in parts]
    kinds = [kind for kind, _ in found]
    kind = next(k for k in ("failed", "passed", "skipped") if k in kinds)
    if kind == "passed":
        return kind, "", ""
    reason = next(last_line(why) for k, why in found if k == kind)
    told = "\n".join(f"[{i}] {why}" for i, (k, why) in enumerate(found) if k == kind)
    return kind, reason, told


def empty(folder: Path) -> None:
    """Remove what the last test left in the suite's folders."""
    for part in ("barrier", "test_dir", "init_dir"):
        for left in (folder / part).iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()


def restore(environment: dict[str, str]) -> None:
    """Undo what a test did to the environment: some leave a debug level behind."""
    import torch.distributed as dist

    import hpcdist

    if dict(os.environ) != environment:
        os.environ.clear()
        os.environ.update(environment)
        dist.set_debug_level_from_env()
        hpcdist.set_debug_level_from_env()


def run(agreement: Agreement, folder: Path, options: argparse.Namespace) -> None:
    """Run the tests and report each."""
    from torch.testing._internal.common_distributed import TEST_SKIPS

    from hpcdist.testing import deadline

    side = SIDES[options.side]()
    skips = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
    cls = build(side, agreement.size, agreement.rank, folder)
    tests = [
        name
        for name in names(cls)
        if (not options.only or name in options.only) and re.search(options.match, name)
    ]
    if options.first:
        tests = tests[tests.index(options.first) :]
    report = options.report.open("a") if options.report and agreement.rank == 0 else None

    def note(**what: Any) -> None:
        if report:
            report.write(json.dumps(what) + "\n")
            report.flush()

    note(tests=tests)
    environment = dict(os.environ)
    for name in tests:
        seconds = options.deadline * SLOWER.get(name, 1)
        note(began=name, limit=seconds)
        began = time.monotonic()
        if agreement.rank == 0:
            empty(folder)
        agreement.texts("")
        with deadline(seconds, name):
            while name == options.hang:
                time.sleep(1)
            found, why = run_one(side, cls(name), skips)
            kind, reason, told = together(agreement.texts(f"{found}\n{why[-TEXT + 50 :]}"))
            try:
                side.stop()
            except Exception as error:
                say(f"[{agreement.rank}] {name}: at the end of its group: {error!r}")
        restore(environment)
        took = time.monotonic() - began
        note(test=name, kind=kind, reason=reason, seconds=round(took, 2))
        if agreement.rank == 0:
            say(f"{kind:8}{took:6.2f} s  {name}  {reason[:200]}")
            if kind == "failed" and options.verbose:
                say(told)
    note(done=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("side", choices=sorted(SIDES), help="what runs under the tests")
    parser.add_argument("--first", metavar="TEST", help="begin with this test")
    parser.add_argument("--only", nargs="+", metavar="TEST", help="run these tests")
    parser.add_argument("--match", default="", metavar="REGEX", help="tests of such a name")
    parser.add_argument("--deadline", type=float, default=DEADLINE, help="seconds for one test")
    parser.add_argument("--hang", default="", help="a test in whose place to hang")
    parser.add_argument("--report", type=Path, help="append a line of JSON for each to this file")
    parser.add_argument("--verbose", action="store_true", help="show the tracebacks of failures")
    options = parser.parse_args()

    agreement = Agreement()
    made = tempfile.mkdtemp(prefix="hpcdist-conformance.") if agreement.rank == 0 else ""
    folder = Path(agreement.texts(made)[0])
    try:
        if agreement.rank == 0:
            prepare(SIDES[options.side].label, agreement.size, folder)
        agreement.texts("")
        prepare(SIDES[options.side].label, agreement.size, folder)
        run(agreement, folder, options)
    finally:
        if agreement.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
