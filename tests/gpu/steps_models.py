"""The modules that steps.py trains: a ResNet-50 and a decoder, in plain torch.nn."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


class Bottleneck(nn.Module):
    """Three convolutions around which the input passes."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.around: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.around = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.around(x))


def resnet(depth: tuple[int, ...] = (3, 4, 6, 3), width: int = 64) -> nn.Module:
    """25.6 million parameters in 161 tensors, as in ResNet-50."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    inputs = width
    for stage, count in enumerate(depth):
        for block in range(count):
            inner = width << stage
            layers.append(Bottleneck(inputs, inner, 2 if stage and not block else 1))
            inputs = 4 * inner
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


class Block(nn.Module):
    """Causal attention and two linear layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.mix(self.before(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(F.gelu(self.wide(self.between(x))))


class Decoder(nn.Module):
    """As GPT-2 with 12 blocks of 768: 137 million parameters, without shared embeddings."""

    def __init__(self, words: int = 32768, width: int = 768, blocks: int = 12, length: int = 512):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, width // 64) for _ in range(blocks)))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        x = self.blocks(self.words(text) + self.places(places))
        return self.head(x).flatten(0, 1)


@dataclass
class Task:
    """What is trained.

    Attributes
    ----------
    module : Module
        On its device.
    inputs, targets : Tensor
        One batch, which every step uses.
    autocast : bool
        Whether the forward pass is computed in bfloat16; otherwise it is so in the module itself.
    """

    module: nn.Module
    inputs: torch.Tensor
    targets: torch.Tensor
    autocast: bool


def task(model: str, device: str, small: bool) -> Task:
    """Make a task, the same each time: "resnet" in autocast, "transformer" in bfloat16."""
    torch.manual_seed(0)
    if model == "resnet":
        batch, pixels = (2, 32) if small else (64, 224)
        module = resnet((1, 1), 8) if small else resnet()
        inputs = torch.randn(batch, 3, pixels, pixels)
        targets = torch.randint(0, 1000, (batch,))
        return Task(module.to(device), inputs.to(device), targets.to(device), True)
    batch, length, words = (2, 16, 64) if small else (8, 512, 32768)
    made = Decoder(words, 64, 1, length) if small else Decoder()
    text = torch.randint(0, words, (batch, length + 1))
    inputs, targets = text[:, :-1].contiguous(), text[:, 1:].flatten()
    return Task(made.to(device, dtype=torch.bfloat16), inputs.to(device), targets.to(device), False)
