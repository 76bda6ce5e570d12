"""An optimizer that averages parameters between ranks after some of its steps."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from hpcdist.parallel.averaging import ModelAverager


class PostLocalSGDOptimizer(torch.optim.Optimizer):
    """Step with a local optimizer, then let an averager do its part.

    All ranks must make and use it in the same way.

    Parameters
    ----------
    optim : torch.optim.Optimizer
        The local optimizer.
    averager : ModelAverager
        Such as ``hpcdist.parallel.averaging.PeriodicModelAverager``, with as many warm-up steps as
        the state of the communication hook has before local SGD starts.

    Notes
    -----
    Source: ``torch.distributed.optim.PostLocalSGDOptimizer``. Unlike it, ``step`` takes a closure.

    Examples
    --------
    >>> state = PostLocalSGDState(None, None, start_localSGD_iter=100)
    >>> model.register_comm_hook(state, post_localSGD_hook)
    >>> optimizer = PostLocalSGDOptimizer(
    ...     torch.optim.SGD(model.parameters(), lr=0.1),
    ...     PeriodicModelAverager(period=4, warmup_steps=100),
    ... )
    """

    def __init__(self, optim: torch.optim.Optimizer, averager: ModelAverager) -> None:
        # Not super().__init__: groups, state and defaults are those of the local optimizer.
        self.optim = optim
        self.averager = averager
        self.defaults = optim.defaults
        self.param_groups = optim.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the local optimizer."""
        return self.optim.state

    def __repr__(self) -> str:
        return f"PostLocalSGDOptimizer({self.optim!r}, {type(self.averager).__name__})"

    def __getstate__(self) -> dict[str, Any]:
        return {"optim": self.optim, "averager": self.averager, "defaults": self.defaults}

    def state_dict(self) -> dict[str, Any]:
        """The state of the local optimizer, and the averager's step as ``"step"``.

        Local to this process.

        Returns
        -------
        dict
            For :meth:`load_state_dict`.
        """
        return {**self.optim.state_dict(), "step": self.averager.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a :meth:`state_dict`, so that the warm-up does not start over.

        Local to this process; do it on all ranks.

        Parameters
        ----------
        state_dict : dict
            One without ``"step"`` is that of a plain optimizer: a warning, and steps from 0.
        """
        own = {name: value for name, value in state_dict.items() if name != "step"}
        self.optim.load_state_dict(own)
        self.param_groups = self.optim.param_groups
        if "step" not in state_dict:
            warnings.warn(
                "the state dict has no step of an averager; its steps, and with them the warm-up, "
                "begin at 0",
                stacklevel=2,
            )
        self.averager.step = state_dict.get("step", 0)

    def step(self, closure: Any = None) -> Any:
        """Step, and average if it is time; all ranks must call it.

        Parameters
        ----------
        closure : callable, optional
            Passed to the local optimizer.

        Returns
        -------
        object
            What the local optimizer returns.
        """
        loss = self.optim.step() if closure is None else self.optim.step(closure)
        self.averager.average_parameters(self.param_groups)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients.

        Local to this process.

        Parameters
        ----------
        set_to_none : bool
            None in place of zeros.
        """
        self.optim.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the local optimizer.

        Local to this process; do it on all ranks.

        Parameters
        ----------
        param_group : dict
            ``"params"`` and options.
        """
        self.optim.add_param_group(param_group)
