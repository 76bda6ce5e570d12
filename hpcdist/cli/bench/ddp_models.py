"""The modules that ``bench ddp`` trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class ManyTiny(nn.Module):
    """A thousand parameters of eight elements: all overhead, no work.

    Parameters
    ----------
    count, width : int
        How many parameters, and elements in each.
    """

    def __init__(self, count: int = 1000, width: int = 8) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.randn(width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply each parameter with `x`, of shape ``(width,)``, and add up the products."""
        # not the sum with x: all parameters would have one gradient, in one memory
        return (torch.stack(list(self.parts)) * x).sum(0)


class CharTransformer(nn.Module):
    """A decoder of characters: embeddings, causal attention blocks, a linear head.

    Parameters
    ----------
    vocabulary, width, heads, layers, context : int
        Characters, numbers per character, attention heads, blocks, and longest sequence.
    """

    def __init__(
        self,
        vocabulary: int = 96,
        width: int = 128,
        heads: int = 4,
        layers: int = 2,
        context: int = 64,
    ) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Scores of the next character, ``(batch, length, vocabulary)``, of a text of numbers."""
        length = text.shape[1]
        x = self.characters(text) + self.places(torch.arange(length, device=text.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=text.device)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return F.log_softmax(self.head(x), -1)


def _mlp() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(5):
        layers += [nn.Linear(2240, 2240), nn.ReLU()]
    return nn.Sequential(*layers)


def _cnn() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Linear(2048, 256), nn.ReLU(), nn.Linear(256, 10)]
    return nn.Sequential(*layers)


Make = Callable[[], Any]

#: Name -> (what it is, what makes the module, what makes the input of a step). The loss is the mean
#: of the output's squares.
MODELS: dict[str, tuple[str, Make, Make]] = {
    "mlp": (
        "five linear layers, 25 M parameters, batch of 8",
        _mlp,
        lambda: torch.randn(8, 2240),
    ),
    "cnn": (
        "three convolutions and two linear layers, batch of 8",
        _cnn,
        lambda: torch.randn(8, 3, 32, 32),
    ),
    "transformer": (
        "two blocks of width 128 on 8 texts of 64 characters",
        CharTransformer,
        lambda: torch.randint(96, (8, 64)),
    ),
    "tiny": ("1,000 parameters of 8 elements", ManyTiny, lambda: torch.randn(8)),
}
