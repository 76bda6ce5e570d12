"""Train a small transformer to write, character by character, data-parallel.

    mpirun -n 2 python examples/08_transformer.py
    mpirun -n 2 python examples/08_transformer.py --steps 2000 --save writer.pt --plot loss.png
    mpirun -n 2 python examples/08_transformer.py --resume writer.pt --steps 3000

The text is Python's own: the source of modules of its standard library. Nothing is downloaded.
The batch is that of all ranks together, so any number of ranks trains the same model, up to
rounding.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from where import add_options, start

import hpcdist as dist

MODULES = ("argparse", "statistics", "fractions", "heapq", "textwrap", "ast", "inspect")
CONTEXT = 64


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small transformer to write.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=300, help="steps of the optimizer in all")
    parser.add_argument("--batch-size", type=int, default=24, help="texts, all ranks together")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and texts")
    parser.add_argument("--every", type=int, default=50, help="steps between two lines")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write a checkpoint at each line")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="go on from a checkpoint")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the losses (matplotlib)")
    parser.add_argument("--write", type=int, default=120, help="characters to write at the end")
    arguments = add_options(parser).parse_args()
    if not all(n > 0 for n in (arguments.steps, arguments.batch_size, arguments.every)):
        parser.error("--steps, --batch-size and --every must be positive")
    if arguments.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    return arguments


def load_text() -> str:
    """The sources, end to end, in ASCII."""
    sources = []
    for name in MODULES:
        found = importlib.util.find_spec(name)
        assert found is not None and found.origin is not None
        sources.append(Path(found.origin).read_text(encoding="utf-8"))
    return "".join(c for c in "".join(sources) if c == "\n" or " " <= c <= "~")


class Block(nn.Module):
    """Attention to what came before, then two linear layers on each character."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.attend(self.before(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.merge(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.think(self.between(x))


class Writer(nn.Module):
    """Scores of the next character at every place of a text."""

    def __init__(self, characters: int, width: int = 96, heads: int = 4, blocks: int = 2) -> None:
        super().__init__()
        self.character = nn.Embedding(characters, width)
        self.place = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(blocks)])
        self.score = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, characters))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        return self.score(self.blocks(self.character(text) + self.place(places)))


def batch_of(text: torch.Tensor, step: int, options: argparse.Namespace) -> torch.Tensor:
    """This rank's texts of a step: all ranks draw the same places, and each takes its part."""
    generator = torch.Generator().manual_seed(options.seed * 1_000_003 + step)
    count = (options.batch_size,)
    starts = torch.randint(len(text) - CONTEXT, count, generator=generator, device="cpu")
    mine = starts.chunk(dist.get_world_size())[dist.get_rank()]
    return torch.stack([text[start : start + CONTEXT + 1] for start in mine.tolist()])


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint on rank 0 so that `path` always holds a whole one, the old or the new."""
    if dist.get_rank() == 0:
        part = path.with_name(path.name + ".part")
        with open(part, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)


def plot(path: Path, losses: list[float]) -> None:
    """Draw the loss of every step, and its mean over the last 20."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(losses, color="lightgray", label="step")
    smooth = [sum(losses[max(0, i - 19) : i + 1]) / min(i + 1, 20) for i in range(len(losses))]
    axes.plot(smooth, label="mean of 20")
    axes.set(xlabel="step", ylabel="loss (nats per character)")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


@torch.no_grad()
def write(model: nn.Module, text: torch.Tensor, count: int) -> list[int]:
    """Go on from the beginning of the text, always with the likeliest character."""
    written = text[:CONTEXT].tolist()
    for _ in range(count):
        scores = model(torch.tensor([written[-CONTEXT:]]))
        written.append(int(scores[0, -1].argmax()))
    return written[CONTEXT:]


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    device = start(options)  # init_process_group, and where new tensors go
    rank, size = dist.get_rank(), dist.get_world_size()
    if options.batch_size % size:
        sys.exit(f"the batch of {options.batch_size} cannot be divided evenly among {size} ranks")
    source = load_text()
    alphabet = sorted(set(source))
    number = {character: i for i, character in enumerate(alphabet)}
    text = torch.tensor([number[character] for character in source])

    torch.manual_seed(options.seed)
    model = dist.DistributedDataParallel(Writer(len(alphabet)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    losses: list[float] = []
    if options.resume:
        state = torch.load(options.resume, map_location=device, weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        losses = state["losses"]
    if rank == 0:
        count = sum(p.numel() for p in model.parameters())
        print(
            f"{count:,} parameters, {len(source):,} characters, {size} rank(s) with "
            f"{options.batch_size // size} texts each per step",
            flush=True,
        )

    began = time.perf_counter()
    for step in range(len(losses), options.steps):
        texts = batch_of(text, step, options)
        scores = model(texts[:, :-1])
        loss = F.cross_entropy(scores.flatten(0, 1), texts[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach()
        dist.all_reduce(total, op=dist.ReduceOp.AVG)
        losses.append(total.item())
        if (step + 1) % options.every == 0 or step + 1 == options.steps:
            if rank == 0:
                print(f"step {step + 1}: loss {losses[-1]:.4f}", flush=True)
            if options.save:
                save(
                    options.save,
                    {
                        "model": model.module.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "losses": losses,
                    },
                )
    if rank == 0:
        print(f"{time.perf_counter() - began:.1f} s", flush=True)
        if options.plot:
            plot(options.plot, losses)
            print(f"losses drawn in {options.plot}", flush=True)
        if options.write:
            written = write(model.module, text, options.write)
            print("it writes:", "".join(alphabet[i] for i in written), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
