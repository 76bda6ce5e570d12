"""Rows of run.py: steps of DDP beside torch's, and torch's own tests for GPUs."""

from __future__ import annotations

import runpy
import sys
from collections import Counter
from types import SimpleNamespace

from gpu_table import HERE, NotRehearsed, Row, adder, after, program, rehearsing

ROWS: list[Row] = []
row = adder(ROWS)


def steps(model: str, variant: str) -> str:
    """The result of steps.py, which needs no mpirun; it is rehearsed on the CPU, over MPI."""
    if rehearsing() and variant == "graph":
        raise NotRehearsed("torch's graphs need a GPU")
    on_cpu = ("--device", "cpu", "--small") if rehearsing() else ()
    said = after(program(str(HERE / "steps.py"), model, variant, *on_cpu), "RESULT\n")
    return f"rehearsed on the CPU: {said}" if rehearsing() else said


@row("DDP step of a transformer in bf16 beside torch's", seconds=25, worth=1)
def transformer() -> str:
    """137 million parameters."""
    return steps("transformer", "eager")


@row("DDP step of a ResNet-50 in bf16 beside torch's", seconds=25, worth=1)
def resnet() -> str:
    """25.6 million parameters in 161 tensors: many small gradients."""
    return steps("resnet", "eager")


@row("DDP step of a transformer in a CUDA graph beside torch's", seconds=25, worth=2)
def transformer_graph() -> str:
    """The whole step is captured."""
    return steps("transformer", "graph")


@row("DDP step of a ResNet-50 in a CUDA graph beside torch's", seconds=25, worth=2)
def resnet_graph() -> str:
    """The whole step is captured."""
    return steps("resnet", "graph")


@row("DDP step of a transformer, compiled, beside torch's", seconds=50, worth=3)
def transformer_compiled() -> str:
    """torch.compile of the module, under both."""
    return steps("transformer", "compiled")


@row("DDP step of a ResNet-50, compiled, beside torch's", seconds=80, worth=4)
def resnet_compiled() -> str:
    """torch.compile of the module, under both."""
    return steps("resnet", "compiled")


#: Names of the tests that use CUDA.
CUDA_TESTS = r"cuda|gpu|nccl|coalesced|ddp|DDP|DistributedDataParallel|SyncBatchNorm"


@row("torch's own tests for GPUs (_DistTestBase), 1 rank, the bridge", seconds=110, worth=3)
def suite() -> str:
    """Those that torch's NCCL passes must pass over the bridge."""
    sys.path[:0] = [str(HERE.parent / "conformance"), str(HERE.parent / "support")]
    conformance = SimpleNamespace(**runpy.run_path(str(HERE.parent / "conformance" / "run.py")))
    match = "^test_ddp_(buffer|comm)" if rehearsing() else CUDA_TESTS
    sides = ("gloo", "bridge") if rehearsing() else ("nccl", "bridge-gpu")
    chosen = conformance.parse(["-k", match, "--deadline", "20", "--verbose"])
    theirs, ours = (conformance.run(side, 1, chosen) for side in sides)
    lines = []
    for one in (theirs, ours):
        kinds = Counter(each.kind for each in one.outcomes.values())
        lines.append(
            f"{one.side}: " + ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        )
    worse = [
        f"{test}: {found.kind}: {found.reason}"
        for test, found in ours.outcomes.items()
        if found.kind in ("failed", "crashed")
    ]
    passed = [test for test, found in theirs.outcomes.items() if found.kind == "passed"]
    defects = [line for line in worse if line.partition(":")[0] in passed]
    problems = [one.problem for one in (theirs, ours) if one.problem]
    said = "; ".join([*lines, f"{len(defects)} fail over the bridge alone", *problems])
    said = "\n".join([said, *worse])
    if defects or problems or not ours.outcomes:
        raise AssertionError(said)
    return said
