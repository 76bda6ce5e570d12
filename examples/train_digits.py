"""Train a small network on handwritten digits, data-parallel.

    mpirun -n 2 python examples/train_digits.py
    mpirun -n 2 python examples/train_digits.py --save digits.pt
    mpirun -n 2 python examples/train_digits.py --resume digits.pt --epochs 30
    python examples/train_digits.py            # one process, no launcher

The data, 1797 images of 8 x 8 pixels, comes with scikit-learn; nothing is downloaded. Each rank
works on its part of every batch; DistributedDataParallel averages the gradients while backward
still runs. The batch is that of all ranks together, so any number of ranks trains the same model,
up to rounding.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from say import on_terminal
from torch import nn
from torch.nn import functional as F
from where import add_options, start

import hpcdist as dist

TEST_SAMPLES = 357  # leaves 1440, whole batches on 1, 2, 3 or 4 ranks
DECAY = 0.93  # of the learning rate, per epoch; does not depend on --epochs, so that runs can go on


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small network on handwritten digits, data-parallel.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training data")
    parser.add_argument("--batch-size", type=int, default=60, help="samples, all ranks together")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate in the first epoch")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and shuffling")
    parser.add_argument("--threads", type=int, default=1, help="per rank; more gain nothing here")
    parser.add_argument("--double", action="store_true", help="float64: rounding shows nowhere")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write a checkpoint each epoch")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="go on from a checkpoint")
    parser.add_argument("--no-progress", action="store_true", help="a line per epoch, no bar")
    arguments = add_options(parser).parse_args()
    numbers = (arguments.epochs, arguments.batch_size, arguments.threads, arguments.lr)
    if not all(number > 0 for number in numbers):
        parser.error("--epochs, --batch-size, --threads and --lr must be positive")
    return arguments


def load_data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Training images (n, 1, 8, 8) and labels (n,), then the same for testing."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SystemExit(
            f"the digits come with scikit-learn, which {sys.executable} does not have: "
            "pip install scikit-learn"
        ) from None
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().div(16).unsqueeze(1)
    labels = torch.from_numpy(digits.target).long()
    # A fixed division: it must not depend on --seed, or resumed runs could be tested on what an
    # earlier one was trained on.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(2024))
    test, train = order[:TEST_SAMPLES], order[TEST_SAMPLES:]
    return images[train], labels[train], images[test], labels[test]


def build_model() -> nn.Module:
    """Two convolutions and two linear layers: 80,000 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


@torch.no_grad()
def evaluate(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Fraction of right answers, each sample counted once; all ranks must call it.

    Takes the bare module: ranks may have different numbers of samples here, which would not do for
    DistributedDataParallel's forward.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    model.eval()
    right = (model(images[rank::size]).argmax(1) == labels[rank::size]).sum()
    model.train()
    dist.all_reduce(right)
    return right.item() / len(labels)


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint so that `path` always holds a whole one, the old or the new."""
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint on every rank, or end the program on every rank if one cannot."""
    state, problem = None, None
    try:
        # weights_only: a checkpoint is data, and reading it runs no code.
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever is wrong with the file, the other ranks must hear of it
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
    problems: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    bad = {rank: text for rank, text in enumerate(problems) if text is not None}
    if bad:
        if dist.get_rank() == 0:
            lines = [f"  rank {rank}: {text}" for rank, text in bad.items()]
            print(
                f"cannot resume from {path}, which must be readable on every rank:",
                *lines,
                sep="\n",
                file=sys.stderr,
                flush=True,
            )
        dist.destroy_process_group()
        raise SystemExit(2)
    assert state is not None
    return state


def progress_bar(steps: int) -> Any:
    """A progress bar; None where the output is no terminal, and, with a notice, without tqdm."""
    if not on_terminal():
        return None  # a log file gets a line per epoch
    try:
        from tqdm import tqdm
    except ImportError:
        print("no progress bar without tqdm: pip install tqdm", file=sys.stderr)
        return None
    # Under Open MPI's mpirun a rank has a terminal of size 0 x 0, on which tqdm would show nothing:
    # so the size is given. Standard error could overtake standard output, where the table goes.
    return tqdm(
        total=steps, unit="step", ncols=80, nrows=24, mininterval=0.2, leave=False, file=sys.stdout
    )


def fingerprint(model: nn.Module) -> str:
    """A hash of all parameters, to the last bit."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def resume(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load a checkpoint into both; return the number of epochs that are done."""
    state = load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["epoch"]


def train_epoch(
    parallel: dist.DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    images: torch.Tensor,
    labels: torch.Tensor,
    batches: Sequence[torch.Tensor],
    bar: Any,
) -> tuple[float, float, float]:
    """Train on this rank's batches, lists of samples.

    Returns the mean loss over all ranks, the seconds, and the share of them that the ranks waited
    for communication.
    """
    total_loss = torch.zeros(())
    waited, began = parallel.communication_seconds, time.perf_counter()
    for batch in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(parallel(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        total_loss += loss.detach()
        if bar:
            bar.update()
    seconds = time.perf_counter() - began
    waited = parallel.communication_seconds - waited
    figures = torch.stack([total_loss / len(batches), torch.tensor(waited / seconds)])
    dist.all_reduce(figures, op=dist.ReduceOp.AVG)
    mean_loss, share = figures.tolist()
    return mean_loss, seconds, share


def check_equal(model: nn.Module) -> str:
    """Compare all parameters between the ranks; return their fingerprint."""
    prints: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(prints, fingerprint(model))
    if len(set(prints)) > 1:
        raise RuntimeError(f"parameters differ between ranks: {prints}")
    return prints[0]


def main() -> None:
    arguments = parse()
    images, labels, test_images, test_labels = load_data()
    if arguments.double:
        images, test_images = images.double(), test_images.double()
        torch.set_default_dtype(torch.float64)
    device = start(arguments)  # init_process_group, and where new tensors go
    images, labels = images.to(device), labels.to(device)
    test_images, test_labels = test_images.to(device), test_labels.to(device)
    rank, size = dist.get_rank(), dist.get_world_size()
    chief = rank == 0
    if arguments.batch_size % size:
        raise SystemExit(f"--batch-size {arguments.batch_size} cannot be divided by {size} ranks")
    torch.set_num_threads(arguments.threads)

    torch.manual_seed(arguments.seed)
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.9)
    done = resume(arguments.resume, model, optimizer) if arguments.resume else 0
    # Compares the module between ranks and copies rank 0's parameters to all.
    parallel = dist.DistributedDataParallel(model)
    sampler = dist.DistributedSampler(images, seed=arguments.seed)
    each = arguments.batch_size // size

    if chief:
        again = f", from epoch {done}" if done else ""
        print(f"{size} rank(s), {arguments.threads} thread(s) each, {len(images)} samples{again}")
        print(f"{'epoch':>5} {'loss':>8} {'test acc':>9} {'samples/s':>10} {'comm':>6}", flush=True)
    all_steps = -(-len(sampler) // each) * max(0, arguments.epochs - done)
    bar = progress_bar(all_steps) if chief and not arguments.no_progress else None
    began = time.perf_counter()
    for epoch in range(done, arguments.epochs):
        sampler.set_epoch(epoch)
        for group in optimizer.param_groups:
            group["lr"] = arguments.lr * DECAY**epoch
        batches = torch.tensor(list(sampler)).split(each)
        loss, seconds, share = train_epoch(parallel, optimizer, images, labels, batches, bar)
        accuracy = evaluate(model, test_images, test_labels)
        if chief:
            if arguments.save:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                save(arguments.save, {**state, "epoch": epoch + 1})
            if bar:
                bar.clear()
            speed = len(sampler) * size / seconds
            print(
                f"{epoch + 1:>5} {loss:>8.4f} {accuracy:>9.2%} {speed:>10.0f} {share:>6.1%}",
                flush=True,
            )
    if bar:
        bar.close()

    accuracy, same = evaluate(model, test_images, test_labels), check_equal(model)
    if chief:
        print(f"test accuracy {accuracy:.2%} after {time.perf_counter() - began:.1f} s")
        print(f"parameters equal on all ranks: {same}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
