"""What ZeroRedundancyOptimizer is given: checked by itself, and compared between ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from hpcdist.groups.comparison import Comparison, Entry, arguments
from hpcdist.groups.state import ProcessGroup
from hpcdist.parallel.describe import describe

API = "ZeroRedundancyOptimizer"


def checked(params: Any) -> list[Any]:
    """Return parameters or groups as a list, or raise."""
    if isinstance(params, torch.Tensor):
        raise TypeError("params must be an iterable of parameters or of groups, not a tensor")
    try:
        items = list(params)
    except TypeError as error:
        raise TypeError(
            f"params must be an iterable of parameters or of groups, not {type(params).__name__}"
        ) from error
    if not items:
        raise ValueError(f"{API} got an empty parameter list")
    if not all(isinstance(i, torch.Tensor) or _is_named(i) for i in items):
        if not all(isinstance(i, dict) for i in items):
            raise TypeError("params must be parameters only, or parameter groups only")
        if any("params" not in group for group in items):
            raise ValueError('each parameter group must have a key "params"')
    return items


def _is_named(item: Any) -> bool:
    """Return whether an item is one of ``named_parameters()``."""
    return isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], torch.Tensor)


def check_divisible(optimizer: Any) -> None:
    """Raise if an optimizer's step of each share is not the step of the whole."""
    if isinstance(optimizer, torch.optim.LBFGS):
        name = type(optimizer).__name__
        raise ValueError(f"{API} cannot divide {name}: its step depends on all parameters together")


def check_dense(params: Iterable[torch.Tensor]) -> None:
    """Raise if a parameter is sparse."""
    for parameter in params:
        if parameter.layout != torch.strided:
            raise ValueError(f"a parameter of layout {parameter.layout} cannot be shared out")


def compare(group: ProcessGroup, stepper: type, param_groups: list[dict[str, Any]]) -> None:
    """Verify that all ranks have these parameters, options and class; they must all call it.

    Raises
    ------
    DistMismatchError
        On all ranks, if they have not.
    """

    def entries() -> Iterator[Entry]:
        yield from arguments({"optimizer_class": f"{stepper.__module__}.{stepper.__qualname__}"})
        for number, options in enumerate(param_groups):
            names = sorted(name for name in options if name != "params")
            yield from arguments({f"{number}.{name}": options[name] for name in names})
            named = ((f"{number}.{i}", each) for i, each in enumerate(options["params"]))
            yield from describe("parameter", named)

    Comparison(
        group,
        API,
        f"{API} expects the same parameters and arguments",
        "Make the model and the optimizer in the same way on every rank",
        entries,
    ).verify()
