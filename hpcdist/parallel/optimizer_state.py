"""An optimizer's state, put back as it was."""

from __future__ import annotations

from typing import Any

import torch

#: Where an optimizer has these, its state may differ from what its state_dict says.
_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


def of_no_parameter(key: Any) -> bool:
    """Return whether a key of an optimizer's state is a name, of what belongs to it as a whole."""
    return not isinstance(key, int)


def load(thing: Any, state: dict[str, Any]) -> None:
    """Load a ``state_dict``, and leave each tensor its dtype.

    torch casts all but ``step`` to the dtype of the parameter. NAdam's ``mu_product``, which is a
    float32, loses 16 bits with parameters in bfloat16.

    Parameters
    ----------
    thing : object
        An optimizer, or another thing with ``load_state_dict``. One with a method or hooks of its
        own for its state gets what these make of it.
    state : dict
        Of ``state_dict()``; the optimizer may have its tensors from here on.
    """
    thing.load_state_dict(state)
    inner = getattr(thing, "optim", thing)  # that of a PostLocalSGDOptimizer
    kept: dict[Any, Any] = getattr(inner, "state", {})
    if not _is_plain(inner) or getattr(thing, "state", None) is not kept:
        return
    parameters = [p for group in inner.param_groups for p in group["params"]]
    numbers = [n for group in state["param_groups"] for n in group["params"]]
    for parameter, number in zip(parameters, numbers, strict=True):
        if parameter in kept:
            kept[parameter] = _with_types(kept[parameter], state["state"].get(number))


def _is_plain(thing: Any) -> bool:
    kind, base = type(thing), torch.optim.Optimizer
    return (
        isinstance(thing, base)
        and kind.load_state_dict is base.load_state_dict
        and kind.state_dict is base.state_dict
        and not any(getattr(thing, name, None) for name in _HOOKS)
    )


def _with_types(now: Any, saved: Any) -> Any:
    """Return what was loaded, with the tensors that were cast as they had been saved."""
    if isinstance(now, torch.Tensor) and isinstance(saved, torch.Tensor):
        return now if now.dtype == saved.dtype else saved.to(now.device)
    if isinstance(now, dict) and isinstance(saved, dict):
        return {key: _with_types(value, saved.get(key)) for key, value in now.items()}
    if type(now) in (list, tuple) and type(saved) is type(now) and len(saved) == len(now):
        return type(now)(map(_with_types, now, saved))
    return now
