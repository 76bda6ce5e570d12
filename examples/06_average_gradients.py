"""Data-parallel training by hand: what DistributedDataParallel does, in forty lines.

    mpirun -n 2 python examples/06_average_gradients.py

Three ideas make it work.

1. All ranks begin with the same parameters: rank 0 broadcasts its own.
2. Each rank computes gradients on its own part of the data.
3. Gradients are averaged before every step. The average over ranks of the mean over a rank's
   samples is the mean over all samples, if the parts are equally large, so that all ranks take the
   step that one process would take on the whole batch.

It trains a small network on scikit-learn's handwritten digits (real data, comes with the package).
``train_digits.py`` does the same with DistributedDataParallel, which sends gradients while backward
still runs.
"""

from __future__ import annotations

import random
import sys

import torch
from say import say, title
from torch.nn import functional as F
from where import options, start

import hpcdist as dist

SEED, EPOCHS, BATCH, LR = 0, 12, 48, 0.5


class Partition:
    """Deals out the samples of a data set to the ranks, like cards."""

    def __init__(self, length: int, rank: int, size: int) -> None:
        self.length, self.rank, self.size = length, rank, size

    def batches(self, epoch: int, batch: int) -> list[list[int]]:
        """This rank's share of each batch of `batch` samples, in an order new in every epoch.

        All ranks shuffle with the same seed, so that they agree on the order without a message.
        The remainder that fills no batch is left out.
        """
        order = list(range(self.length))
        random.Random(SEED + epoch).shuffle(order)
        each = batch // self.size
        starts = range(0, self.length - batch + 1, batch)
        return [order[s + self.rank * each : s + (self.rank + 1) * each] for s in starts]


def load_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """1797 images of 8 x 8 pixels as vectors in [0, 1], and their labels 0 to 9."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        sys.exit("this example needs scikit-learn: pip install scikit-learn")
    digits = load_digits()
    images = torch.from_numpy(digits.data / 16).float()
    return images, torch.from_numpy(digits.target).long()


def average_gradients(model: torch.nn.Module) -> None:
    """Replace every gradient by its average over all ranks."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)


def main() -> None:
    torch.set_num_threads(1)  # the network is far too small for more
    device = start(options(__doc__))  # init_process_group, and where new tensors go
    rank, size = dist.get_rank(), dist.get_world_size()
    if BATCH % size:
        sys.exit(f"the batch of {BATCH} cannot be divided evenly among {size} ranks")
    images, labels = (each.to(device) for each in load_digits())
    train, test = slice(0, 1437), slice(1437, None)

    torch.manual_seed(SEED + rank)  # different on purpose: the broadcast must do its job
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)

    title(f"training on {size} rank(s), {BATCH // size} samples each per step")
    partition = Partition(len(labels[train]), rank, size)
    for epoch in range(EPOCHS):
        total = torch.zeros(1)
        shares = partition.batches(epoch, BATCH)
        for share in shares:
            loss = F.cross_entropy(model(images[train][share]), labels[train][share])
            model.zero_grad()
            loss.backward()
            average_gradients(model)
            with torch.no_grad():  # SGD: a step against the gradient
                for parameter in model.parameters():
                    parameter -= LR * parameter.grad
            total += loss.detach()
        dist.all_reduce(total, op=dist.ReduceOp.AVG)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {total.item() / len(shares):.4f}", flush=True)

    accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean().item()
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    lowest, highest = flat.clone(), flat.clone()
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    assert torch.equal(lowest, highest), "parameters differ between ranks"
    say(f"test accuracy {accuracy:.1%}, parameters equal on all ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
