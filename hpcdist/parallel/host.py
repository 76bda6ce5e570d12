"""Structures of tensors, brought into ordinary memory."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch


def on_cpu(thing: Any) -> Any:
    """Return a structure with its tensors in ordinary memory, as the codec needs them."""
    if isinstance(thing, torch.Tensor):
        return thing.detach().cpu()
    if type(thing) in (dict, OrderedDict):
        made = type(thing)((key, on_cpu(value)) for key, value in thing.items())
        if type(made) is OrderedDict:  # a module's state has its parts' versions as an attribute
            vars(made).update(vars(thing))
        return made
    if type(thing) in (list, tuple):
        return type(thing)(on_cpu(value) for value in thing)
    return thing
