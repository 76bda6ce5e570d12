"""A training run in which ranks kill themselves; prints what the survivors have at the end.

training.py KIND STEPS COPIES [RANK=WHEN+DELAY]...: KIND is sgd, adam, zero, norm (with
buffers and random numbers that differ per rank) or halves (the same, with zero, in two groups that
train a model each); torchsgd, torchadam and torchnorm are the same
with torch's own DistributedDataParallel over the bridge, torchfsdp and torchfsdpnorm with its FSDP2
in place of that. Each victim, a rank of the first world, dies DELAY seconds after it begins step
WHEN, or, if that is "recovery", after its first recovery begins. A spare, by its number in MPI,
dies after the others have begun step WHEN; with "joined" the former spare that has the place of
that rank, after it has got it. HPCDIST_TEST_KEEP_BATCH=1 lets the batch stay when ranks die.
training.py reference STEPS KIND:SIZES...: for each text of sizes, such as 4433 for two steps with
four ranks and then two with three, the same training in groups of so many ranks, without a death.
"""

from __future__ import annotations

import faulthandler
import hashlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

import hpcdist as dist
from hpcdist.elastic import State, elastic, joining
from hpcdist.optim import ZeroRedundancyOptimizer

BATCH, WIDTH, SEED = 24, 48, 1
#: How the kinds over stock torch begin.
STOCK = "torch"
#: The kind with groups.
HALVES = "halves"
#: When victims die, by rank and whether it is the former spare that has got that rank's place.
Deaths = dict[tuple[int, bool], tuple[str, float]]


def bare(norm: bool = False) -> torch.nn.Sequential:
    torch.manual_seed(SEED)
    between = [torch.nn.BatchNorm1d(200), torch.nn.Dropout(0.2)] if norm else [torch.nn.Tanh()]
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 200),
        *between,
        torch.nn.Linear(200, 90),
        torch.nn.Linear(90, 5),
    )


def build(kind: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    side = torch.nn.parallel if kind.startswith(STOCK) else dist
    kind = kind.removeprefix(STOCK)
    model = bare(kind.endswith("norm") or kind == HALVES)
    if kind == HALVES:
        half, _ = dist.new_subgroups(2)
        parallel = dist.DistributedDataParallel(model, process_group=half)
        torch.manual_seed(100 * SEED + dist.get_rank())
        return parallel, ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.Adam, process_group=half, lr=0.01
        )
    if kind.startswith("fsdp"):
        from torch.distributed.fsdp import fully_shard

        kind = kind.removeprefix("fsdp") or "adam"
        for each in (model[0], model):
            parallel = fully_shard(each)
    else:
        parallel = side.DistributedDataParallel(model)
    torch.manual_seed(100 * SEED + dist.get_rank())
    if kind in ("sgd", "norm"):
        return parallel, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if kind == "adam":
        return parallel, torch.optim.Adam(model.parameters(), lr=0.01)
    return parallel, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)


def digest(*things: object) -> str:
    found = hashlib.sha256()
    for thing in things:
        tensors = thing if isinstance(thing, list) else [thing]
        for tensor in tensors:
            whole = getattr(tensor, "full_tensor", lambda given=tensor: given)()
            found.update(whole.detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def optimizer_digest(optimizer: torch.optim.Optimizer) -> str:
    """Of the whole state, wherever it is."""
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer.consolidate_state_dict(0)
        if optimizer.rank:
            return "-"
    state = optimizer.state_dict()["state"]
    return digest([state[k][n].double() for k in sorted(state) for n in sorted(state[k])])


def one_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    index: int,
    shares: Iterable[int],
    share_count: int,
) -> None:
    """Depends on the step, and on the shares and their number."""
    generator = torch.Generator().manual_seed(1000 * SEED + index)
    data = torch.randn(BATCH, WIDTH, generator=generator)
    labels = torch.randint(5, (BATCH,), generator=generator)
    optimizer.zero_grad()
    for share in shares:
        output = model(data[share::share_count])
        torch.nn.functional.cross_entropy(output, labels[share::share_count]).backward()
    optimizer.step()


def report(sizes: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """What the end of a run is compared by; all ranks must call it."""
    whole = optimizer_digest(optimizer)
    parameters = digest(list(model.parameters()))  # DDP's are the module's
    return f"end sizes {sizes} parameters {parameters} optimizer {whole}"


def without_a_death(kind: str, sizes: str) -> None:
    """Train with groups of those sizes, and print what rank 0 has."""
    model = bare()
    if kind == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    before, parallel, group = "", None, None
    for index, size in enumerate(sizes):
        if size != before:
            before, group = size, dist.new_group(range(int(size)))
            if dist.get_rank() < int(size):
                parallel = dist.DistributedDataParallel(model, process_group=group)
        if dist.get_rank() < int(size):
            one_step(parallel, optimizer, index, [dist.get_rank(group)], int(size))
    if dist.get_rank() == 0:
        print(f"{kind} {report(sizes, model, optimizer)}", flush=True)


def die_after(delay: float) -> None:
    def die() -> None:
        time.sleep(delay)
        print(f"dies {time.time():.6f}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=die, daemon=True).start()


def die_as_spare(deaths: Deaths) -> None:
    """Let this process die while it waits in init_process_group, if it is a victim."""
    number = int(os.environ.get("OMPI_COMM_WORLD_RANK", -1))
    when, delay = deaths.get((number, False), ("", 0.0))
    sign = Path(os.environ.get("HPCDIST_TEST_FOLDER", ""), when)

    def die() -> None:
        while not sign.exists():
            time.sleep(0.002)
        if not dist.is_initialized():  # else it has taken a place meanwhile
            die_after(delay)

    if when and os.environ.get("HPCDIST_TEST_FOLDER"):
        threading.Thread(target=die, daemon=True).start()


def with_deaths(kind: str, steps: int, copies: int, deaths: Deaths) -> None:
    """Train, die if this rank is a victim, and print what rank 0 has."""
    when, delay = deaths.get((dist.get_rank(), joining()), ("never", 0.0))
    folder = os.environ.get("HPCDIST_TEST_FOLDER")
    if when == "recovery":
        dist.group.WORLD.register_abort_hook(1, lambda: die_after(delay))
    elif when == "joined" and folder and not Path(folder, when).exists():
        Path(folder, when).touch()  # the next spare in that place lives
        die_after(delay)
    model, optimizer = build(kind)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    keep_batch = bool(os.environ.get("HPCDIST_TEST_KEEP_BATCH"))
    state = State(copies=copies, rebuild=keep_batch or kind == HALVES, **parts)
    state.values.sizes = {}
    recovered = False
    for step in elastic(state, steps, keep_batch=keep_batch):
        lost = len(state.lost)
        with step:
            if str(step.index) == when:
                when = "now"
                die_after(delay)
            if folder and dist.get_rank() == dist.get_world_size() - 1:
                Path(folder, str(step.index)).touch()
            one_step(model, optimizer, step.index, step.shares(), step.share_count)
            state.values.sizes[step.index] = step.share_count
        if len(state.lost) > lost:
            recovered = True
        elif recovered:  # a step has ended since
            recovered = False
            print(f"again {time.time():.6f}", flush=True)
    sizes = "".join(str(state.values.sizes[i]) for i in range(steps))
    found = report(sizes, model, optimizer)
    everyone = [None] * dist.get_world_size()
    own = {}
    for share in state.batch.mine:
        state.batch.turn_to(share)
        own[share] = digest(list(model.buffers()), torch.get_rng_state())
    if kind == HALVES:  # they differ: compared rank by rank, too
        own = {share: f"{each} {found}" for share, each in own.items()}
        found = f"end sizes {sizes} parameters {kind} optimizer {kind}"
    dist.all_gather_object(everyone, (found.partition(" optimizer")[0], own))
    assert len({same for same, _ in everyone}) == 1, everyone
    if dist.get_rank() == 0:
        all_own = {share: each for _, own in everyone for share, each in own.items()}
        owns = hashlib.sha256(repr(sorted(all_own.items())).encode()).hexdigest()[:16]
        print(f"{kind} {found} own {owns} lost {state.lost} repeated {state.repeated}", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(100, exit=True)
    kind, steps, *rest = sys.argv[1:]
    deaths = {}
    for death in rest[1:] if kind != "reference" else []:
        rank, when, delay = re.fullmatch(r"(\d)=(\w+)\+(\S+)", death).groups()
        deaths[int(rank), when == "joined"] = when, float(delay)
    die_as_spare(deaths)
    side: Any = dist
    if kind.startswith(STOCK):
        import hpcdist.torch as side
    side.init_process_group(timeout=timedelta(seconds=40))
    if kind == "reference":
        for wanted in rest:
            faulthandler.dump_traceback_later(100, exit=True)
            without_a_death(*wanted.split(":"))
    else:
        with_deaths(kind, int(steps), int(rest[0]), deaths)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
