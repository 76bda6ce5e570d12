"""Training whose batch stays, for cases of test_shares.py: shares.py STEPS FOLDER [RANK=STEP]...

Models that need care, in one State: one whose parameters are not all used in each share, with
gradients as views; one with BatchNorm and Dropout; one that accumulates in a share, and over steps.
Each victim dies in its first share. FOLDER is where commits are kept, or "-".
"""

from __future__ import annotations

import faulthandler
import hashlib
import os
import signal
import sys
from datetime import timedelta

import torch

import hpcdist as dist
from hpcdist.elastic import State, elastic
from hpcdist.optim import ZeroRedundancyOptimizer

SAMPLES = 24


class Branches(torch.nn.Module):
    """Of whose layers some shares use one, some another, and none the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(40, 40) for _ in range(4))
        self.conv = torch.nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor, share: int) -> torch.Tensor:
        image = self.conv(x.view(len(x), 2, 4, 5)).flatten(1).sum(1)
        return self.layers[0](x).tanh().sum(1) + self.layers[1 + share % 2](x).sum(1) + image


def digest(tensors: list[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:12]


class Training:
    """The models, and a step with them."""

    def __init__(self, folder: str) -> None:
        torch.manual_seed(1)
        ddp = dist.DistributedDataParallel
        self.branches = ddp(Branches(), find_unused_parameters=True, gradient_as_bucket_view=True)
        norm = torch.nn.Sequential(
            torch.nn.Linear(40, 40), torch.nn.BatchNorm1d(40), torch.nn.Dropout(0.3)
        )
        self.norm = ddp(norm)
        self.adds = ddp(torch.nn.Linear(40, 60), forward_sync_buffers=False)
        self.models = [self.branches, self.norm, self.adds]
        torch.manual_seed(50 + dist.get_rank())
        first = [*self.branches.parameters(), *self.norm.parameters()]
        self.zero = ZeroRedundancyOptimizer(first, torch.optim.Adam, lr=0.01)
        self.sgd = torch.optim.SGD(self.adds.parameters(), lr=0.05, momentum=0.9)
        kept = {"folder": folder, "folder_every": 1} if folder != "-" else {}
        models = {"branches": self.branches, "norm": self.norm, "adds": self.adds}
        self.state = State(**models, zero=self.zero, sgd=self.sgd, copies=2, **kept)
        self.state.values.seen = []

    def forward(self, x: torch.Tensor, share: int) -> torch.Tensor:
        return (
            self.branches(x, share).mean() + (self.norm(x) ** 2).mean() + (self.adds(x) ** 2).mean()
        )

    def step(self, step: object, dies: bool) -> None:
        data = torch.randn(SAMPLES, 40, generator=torch.Generator().manual_seed(step.index))
        self.zero.zero_grad()
        if step.index % 2 == 0:
            self.sgd.zero_grad()
        for share in step.shares():
            mine = data[share :: step.share_count]
            with self.adds.no_sync():
                self.adds(mine * 0.5).mean().backward()
            loss = self.forward(mine, share)
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
            self.state.values.seen.append((share, step.index))
        torch.nn.utils.clip_grad_norm_(self.norm.parameters(), 0.5)
        self.zero.step()
        if step.index % 2:
            self.sgd.step()


def main() -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(100, exit=True)
    steps, folder, *deaths = sys.argv[1:]
    dist.init_process_group(timeout=timedelta(seconds=30))
    fatal = dict(death.split("=") for death in deaths).get(str(dist.get_rank()), -1)
    training = Training(folder)
    state = training.state
    for step in elastic(state, int(steps), every=2, keep_batch=True):
        with step:
            training.step(step, step.index == int(fatal))
    parameters = digest([p for model in training.models for p in model.parameters()])
    own = {}
    for share in state.batch.mine:
        state.batch.turn_to(share)
        buffers = [b for model in training.models for b in model.buffers()]
        own[share] = digest([*buffers, torch.get_rng_state()]), state.values.seen
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (parameters, own))
    assert len({same for same, _ in everyone}) == 1, everyone
    if dist.get_rank() == 0:
        for share, each in sorted(each for _, own in everyone for each in own.items()):
            print(f"share {share} {each}", flush=True)
        print(f"end {parameters} ranks {len(everyone)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
