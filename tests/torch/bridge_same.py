"""What runs over torch.distributed gives over hpcdist what it gives over gloo.

    mpirun -n 4 python bridge_same.py FOLDER [CASE ...]

Every case runs twice in this process: over hpcdist, and over gloo, both started by ``mpi://``. A
case is a function of the folder it may write to, and gives named results; rank by rank they must
be equal to 1e-6. Each line of the output names a case that is.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as td

import hpcdist.torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import bridge_calls
import bridge_compiled
import bridge_functional
import bridge_hooks
import bridge_orders
import bridge_profiled
import bridge_sharded
import bridge_training
from trees import compare

warnings.filterwarnings("ignore")

MODULES = (
    bridge_calls,
    bridge_orders,
    bridge_functional,
    bridge_training,
    bridge_hooks,
    bridge_sharded,
    bridge_profiled,
    bridge_compiled,
)
LIMIT = float(os.environ.get("BRIDGE_LIMIT", 30))
CASES = {name: case for module in MODULES for name, case in module.CASES.items()}


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def results(backend: str, names: list[str], folder: str) -> dict[str, object]:
    """Every case's results over one backend; of one that fails, its traceback."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    hpcdist.torch.init_process_group(backend, timeout=timedelta(seconds=LIMIT))
    assert td.get_backend() == backend
    store = td.distributed_c10d._get_default_store()
    found: dict[str, object] = {}
    for name in names:
        torch.manual_seed(11)
        torch.compiler.reset()
        part = os.path.join(folder, backend, name.replace(" ", "_"))
        if td.get_rank() == 0:
            os.makedirs(part)
        td.barrier()
        began = time.monotonic()
        try:
            found[name] = CASES[name](part)
        except Exception:
            found[name] = traceback.format_exc()
            say(f"rank {td.get_rank()}: {name} over {backend}: {found[name]}")
        # through the store: a rank that failed alone leaves the others in another operation
        failed = isinstance(found[name], str)
        store.set(f"{name} {td.get_rank()}", str(int(failed)))
        ends = [store.get(f"{name} {rank}") for rank in range(td.get_world_size())]
        if b"1" in ends and not failed:
            found[name] = "it failed on another rank"
        if os.environ.get("BRIDGE_TIMES") and td.get_rank() == 0:
            say(f"# {time.monotonic() - began:6.2f} s  {backend} {name}")
    td.destroy_process_group()
    return found


def differences(ours: object, theirs: object) -> str:
    """What is wrong with a case; nothing if the results are equal."""
    if isinstance(ours, str) or isinstance(theirs, str):
        parts = (("hpcdist", ours), ("gloo", theirs))
        return "\n".join(f"over {name}: {got}" for name, got in parts if isinstance(got, str))
    try:
        assert ours, "a case without results shows nothing"
        compare(ours, theirs)
    except AssertionError as error:
        return str(error)
    return ""


def main() -> int:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    folder, *names = sys.argv[1:]
    names = names or list(CASES)
    rank, size = hpcdist.torch.rendezvous.mpi.start()
    names = [name for name in names if getattr(CASES[name], "least", 1) <= size]
    ours = results("hpcdist", names, folder)
    theirs = results("gloo", names, folder)
    wrong = 0
    for name in names:
        problem = differences(ours[name], theirs[name])
        wrong += bool(problem)
        say(f"rank {rank}: {name}: {problem or 'same'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
