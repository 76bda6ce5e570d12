"""Rows of run.py: where the GPU is, CUDA tensors over MPI, stock torch, and the examples."""

from __future__ import annotations

from gpu_table import EXAMPLES, HERE, Row, adder, last, mpirun, needs_a_gpu, size

ROWS: list[Row] = []
row = adder(ROWS)


@row("where the GPU is", seconds=6, worth=3)
def place() -> str:
    """What /sys and /proc tell of the GPU that CUDA sees."""
    import torch

    from hpcdist import hardware

    seen = hardware.visible(hardware.gpus())
    needs_a_gpu("there is none to be found")
    known = torch.cuda.get_device_properties(0)
    if not seen:
        return "neither /sys nor /proc shows a GPU here (a container?)"
    bus = f"{known.pci_domain_id:04x}:{known.pci_bus_id:02x}:{known.pci_device_id:02x}.0"
    assert bus in [gpu.bus for gpu in seen], (bus, seen)
    gpu = next(gpu for gpu in seen if gpu.bus == bus)
    near, how = hardware.nearest(gpu, hardware.adapters())
    names = ", ".join(each.name for each in near) or "none"
    return f"{bus}, NUMA node {gpu.node}, nearest adapters {names} {how}".rstrip()


@row("diagnose shows GPU and NCCL", seconds=12, worth=3)
def diagnosis() -> str:
    """The section of GPUs, with NCCL's version and file."""
    needs_a_gpu("without one it shows no NCCL")
    said = mpirun(1, "-m", "hpcdist", "diagnose")
    found = [line.split(None, 1) for line in said.splitlines() if line.strip().startswith("NCCL ")]
    assert found, said
    return f"NCCL {found[0][1].strip()}"


@row("MPI takes GPU memory", seconds=10, worth=3)
def awareness() -> str:
    """What the library says of itself."""
    program = """
import hpcdist as dist
from hpcdist.backends.cuda_over_mpi import aware
dist.init_process_group("mpi")
print(*aware.library_report())
"""
    return last(mpirun(1, "-c", program))


@row("over MPI, 2 ranks on this GPU: every operation and element type", seconds=30, worth=1)
def over_two() -> str:
    """Through the ring of pinned buffers, beside the same on the host."""
    return last(mpirun(2, str(HERE / "ranks.py"), "correct", HPCDIST_CUDA_AWARE="no"))


@row("over MPI, 4 ranks on this GPU: every operation and element type", seconds=40, worth=1)
def over_four() -> str:
    """The same with uneven parts of a buffer."""
    return last(mpirun(4, str(HERE / "ranks.py"), "correct", HPCDIST_CUDA_AWARE="no"))


@row("over MPI: a CUDA graph is refused", seconds=12, worth=3)
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
dist.all_reduce(data)
assert bool((data == 1).all())
dist.destroy_process_group()
"""
    said = mpirun(1, "-c", program)
    assert "cannot be captured into a CUDA graph" in said, said
    return "with a clear error"


STOCK = """
import sys, torch, torch.distributed as td, hpcdist, hpcdist.torch
torch.cuda.set_device(0)
which, n = sys.argv[1], int(sys.argv[2])
options = hpcdist.MPIOptions() if which == "hpcdist" else None
hpcdist.torch.init_process_group(which, pg_options=options)
size = td.get_world_size()
for put in (lambda t: t, lambda t: t.to("cuda")):
    data = put(torch.ones(n))
    td.all_reduce(data)
    work = td.all_reduce(data, async_op=True)
    work.wait()
    assert bool((data == size * size).all())
    out = put(torch.zeros(size * 5))
    td.all_gather_into_tensor(out, data[:5].contiguous())
    assert bool((out == size * size).all())
    held = td.all_reduce(data, async_op=True).get_future().then(lambda f: f.value()[0] / size)
    assert bool((held.wait() == size * size).all())
    if size > 1:
        peer, back = 1 - td.get_rank(), put(torch.zeros(n // 2))
        batch = [td.P2POp(td.isend, data[: n // 2], peer), td.P2POp(td.irecv, back, peer)]
        for each in td.batch_isend_irecv(batch):
            each.wait()
        assert bool((back == data[0]).all())
backend = td.group.WORLD._get_backend(torch.device("cuda"))
ours = type(hpcdist.torch.group()._backends["cuda"])
if td.get_rank() == 0:
    print(type(backend).__name__, ours.__name__, flush=True)
td.destroy_process_group()
"""


@row("stock torch, cpu:hpcdist,cuda:nccl, one rank: torch's own NCCL", seconds=15, worth=2)
def stock_nccl() -> str:
    """CUDA tensors go to ProcessGroupNCCL, the host's over MPI."""
    needs_a_gpu("this torch has no NCCL")
    said = last(mpirun(1, "-c", STOCK, "cpu:hpcdist,cuda:nccl", "3000000"))
    assert said.startswith("ProcessGroupNCCL"), said
    return said


@row("stock torch, hpcdist, 2 ranks on this GPU: the ring", seconds=15, worth=2)
def stock_ring() -> str:
    """Collectives, messages and futures of CUDA tensors through pinned memory."""
    n = str(size(3_000_000, 30_000))
    said = last(mpirun(2, "-c", STOCK, "hpcdist", n, HPCDIST_CUDA_AWARE="no"))
    assert said == "BridgeGroup StagedGroup", said
    return said


@row("examples --device cuda, one rank, NCCL", seconds=60, worth=4)
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
    needs_a_gpu("the stand-in's tensors are no parameters of modules")
    for name, options in names.items():
        mpirun(1, str(EXAMPLES / name), "--device", "cuda", *options)
    return f"{len(names)} ran"


@row("examples --device cuda --backend mpi, 2 ranks on this GPU", seconds=60, worth=4)
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
    needs_a_gpu("the stand-in's tensors are no parameters of modules")
    for name, options in names.items():
        mpirun(2, str(EXAMPLES / name), *shared, *options)
    return f"{len(names)} ran"


@row("examples for stock torch --device cuda, 2 ranks on this GPU", seconds=30, worth=4)
def examples_torch() -> str:
    """torch's DTensor, and FSDP2 with its checkpoints, over the bridge."""
    needs_a_gpu("the stand-in's tensors are no parameters of modules")
    for name in ("dtensor.py", "fsdp2_checkpoint.py"):
        mpirun(2, str(EXAMPLES / "torch" / name), "--device", "cuda", "--backend", "mpi")
    return "2 ran"
