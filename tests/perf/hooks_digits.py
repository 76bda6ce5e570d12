"""How well the digits are learnt with each communication hook.

    mpirun -n 2 python tests/perf/hooks_digits.py

Prints the table of docs/hooks.md: the loss of the last epoch, the test accuracy (mean of several
seeds) and what a step sends. All start alike and see the same batches.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch.nn import functional as F

import hpcdist as dist
from hpcdist.optim import PostLocalSGDOptimizer
from hpcdist.parallel import comm_hooks
from hpcdist.parallel.averaging import PeriodicModelAverager

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from train_digits import DECAY, build_model, evaluate, load_data

BATCH, WARM = 60, 60


def powersgd(rank):
    state = comm_hooks.PowerSGDState(
        None, rank, start_powerSGD_iter=WARM, min_compression_rate=1.5, use_error_feedback=True
    )
    return state, comm_hooks.powerSGD_hook


def post_local():
    state = comm_hooks.PostLocalSGDState(None, None, WARM, post_local_gradient_allreduce=False)
    return state, comm_hooks.post_localSGD_hook


HOOKS = {
    "none": (None, 1.0),
    "bf16_compress_hook": (lambda: (None, comm_hooks.bf16_compress_hook), 0.5),
    "fp16_compress_hook": (lambda: (None, comm_hooks.fp16_compress_hook), 0.5),
    "quantization_perchannel_hook": (
        lambda: (None, comm_hooks.quantization_perchannel_hook),
        (1 + 8 / 512) / 4,
    ),
    "powerSGD_hook, rank 1": (lambda: powersgd(1), None),
    "powerSGD_hook, rank 4": (lambda: powersgd(4), None),
    "batched_powerSGD_hook, rank 1": (
        lambda: (powersgd(1)[0], comm_hooks.batched_powerSGD_hook),
        None,
    ),
    "post_localSGD_hook, every 4th step": (post_local, 0.25),
}


def train(hook, epochs, seed, data):
    images, labels, test_images, test_labels = data
    torch.manual_seed(seed)
    model = dist.DistributedDataParallel(build_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, DECAY)
    state = None
    stepper = optimizer
    if hook is not None:
        state, function = hook()
        model.register_comm_hook(state, function)
    if isinstance(state, comm_hooks.PostLocalSGDState):
        stepper = PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(4, WARM))
    each, me = BATCH // dist.get_world_size(), dist.get_rank()
    mean = torch.zeros(1)
    for epoch in range(epochs):
        order = torch.randperm(
            len(labels), generator=torch.Generator().manual_seed(seed * 1000 + epoch)
        )
        mean.zero_()
        starts = range(0, len(labels) - BATCH + 1, BATCH)
        for start in starts:
            mine = order[start + me * each : start + (me + 1) * each]
            loss = F.cross_entropy(model(images[mine]), labels[mine])
            optimizer.zero_grad()
            loss.backward()
            stepper.step()
            mean += loss.detach() / len(starts)
        schedule.step()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    rate = state.compression_stats()[0] if isinstance(state, comm_hooks.PowerSGDState) else None
    accuracy = evaluate(model.module, test_images, test_labels)
    return mean.item(), accuracy, rate


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group()
    data = load_data()
    if dist.get_rank() == 0:
        print("| hook | loss | test accuracy | of the bytes |\n|---|---|---|---|", flush=True)
    for name, (hook, share) in HOOKS.items():
        runs = [train(hook, options.epochs, seed, data) for seed in range(options.seeds)]
        loss, accuracy = (sum(run[i] for run in runs) / len(runs) for i in (0, 1))
        part = share if share is not None else 1 / runs[0][2]
        if dist.get_rank() == 0:
            print(f"| {name} | {loss:.4f} | {accuracy:.1%} | {part:.0%} |", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
