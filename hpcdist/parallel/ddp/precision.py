"""Mixed precision: keeps a module's parameters in full precision and uses them in a lower one.

In forward each parameter's place in the module holds a copy in the lower precision, made by a
conversion that autograd knows. So gradients arrive at the parameters themselves in full precision,
also where they accumulate over several backward passes. In backward the copies are in place again,
because activation checkpointing runs parts of forward there.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch

from hpcdist.parallel.ddp.arguments import sparse_indices
from hpcdist.parallel.reducer.failure import current_backward, watch
from hpcdist.parallel.reducer.graph import find_tensors


@dataclass
class MixedPrecision:
    """The precision in which a DistributedDataParallel computes and communicates.

    Only floating point tensors are converted. Parameters, their gradients and checkpoints stay in
    full precision.

    Parameters
    ----------
    param_dtype : torch.dtype, optional
        Type of parameters and inputs in forward and backward. Default: not converted.
    reduce_dtype : torch.dtype, optional
        Type in which gradients are averaged between ranks, other than sparse ones, which are
        averaged in full precision. Default: `param_dtype`.
    buffer_dtype : torch.dtype, optional
        Type to which construction converts buffers permanently. Default: not converted.

    Notes
    -----
    Local. Source: ``torch.nn.parallel.distributed._MixedPrecision``, which is accepted as well.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None


def _check(settings: Any) -> None:
    for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
        dtype = getattr(settings, name)
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(
                f"{name} of mixed_precision must be a floating point dtype, not {dtype}: only "
                "floating point tensors are converted"
            )


class _Converted(torch.autograd.Function):
    """``Tensor.to``, whose own backward refuses sparse gradients."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return tensor.to(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient.to(ctx.dtype), None


class Precision:
    """Puts low precision copies into a module, and removes them again.

    Parameters
    ----------
    module : torch.nn.Module
        Whose floating point parameters are used in another precision.
    settings : MixedPrecision
        Or anything with its attributes.
    ignored : collection of str
        Names of parameters and buffers to leave alone.
    """

    def __init__(self, module: torch.nn.Module, settings: Any, ignored: Collection[str]) -> None:
        _check(settings)
        self.dtype: torch.dtype | None = settings.param_dtype
        skipped = {id(t) for n, t in module.named_parameters() if n in ignored}
        parameters = list(module.parameters())
        sparse = {id(parameters[i]) for i in sparse_indices(module, parameters)}
        # Places, not tensors: torch.func.functional_call, for instance, puts other ones there.
        self._places: list[tuple[Any, str, bool]] = [
            (owner._parameters, name, id(parameter) in sparse)
            for owner in module.modules()
            for name, parameter in owner._parameters.items()
            if parameter is not None
            and parameter.is_floating_point()
            and id(parameter) not in skipped
            and self.dtype not in (None, parameter.dtype)
        ]
        self._copies: list[tuple[Any, str, torch.Tensor]] = []  # for the places, at last forward
        self._awaited = False  # a backward has yet to run with them
        # The copies that are in their places, each with what was there before.
        self._held: list[tuple[Any, str, torch.Tensor, torch.Tensor]] = []
        self._task: int | None = None  # autograd's number of the backward pass that it is in
        if settings.buffer_dtype is not None:
            for name, buffer in module.named_buffers():
                if buffer.is_floating_point() and name not in ignored:
                    buffer.data = buffer.to(settings.buffer_dtype)

    @contextmanager
    def in_forward(self) -> Iterator[None]:
        """Compute in low precision within, with copies of the parameters as they are now."""
        self._leave()  # with a backward's copies, if this runs in it
        # A checkpoint could compute no gradients again with those made without a graph.
        awaited = self._copies if self._awaited and not torch.is_grad_enabled() else None
        self._copies = []  # first, so that old and new copies do not exist at the same time
        made: dict[int, torch.Tensor] = {}  # a shared parameter is converted once
        for parameters, name, sparse in self._places:
            if name in parameters:  # else removed since, as by torch.nn.utils.prune
                parameter = parameters[name]
                if id(parameter) not in made:
                    convert = _Converted.apply if sparse else torch.Tensor.to
                    made[id(parameter)] = convert(parameter, self.dtype)
                self._copies.append((parameters, name, made[id(parameter)]))
        earlier, self._held = self._held, []
        self._enter()
        try:
            yield
        finally:
            self._leave()
            self._held = earlier
            if awaited is not None:
                self._copies = awaited

    def watch(self, output: Any) -> None:
        """Put the copies into the module again while a backward from `output` runs."""
        if not self._places:
            return
        for tensor in find_tensors(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(self._on_backward)
                self._awaited = True

    def _on_backward(self, _gradient: torch.Tensor) -> None:
        if self._task is None:
            self._task = current_backward()
            self._enter()
            watch(self)

    def end_of_backward(self) -> None:
        """Take the copies out of the module."""
        self._leave()
        self._held, self._awaited = [], False

    def cut_off(self, task: int) -> None:
        """Do the same after an exception in backward.

        Parameters
        ----------
        task : int
            Autograd's number of the backward.
        """
        if self._task == task:
            self.end_of_backward()

    def _enter(self) -> None:
        for parameters, name, low in self._copies:
            if name in parameters:
                self._held.append((parameters, name, low, parameters[name]))
                parameters[name] = low

    def _leave(self) -> None:
        """Put back what was in the places, but for those where the program put something else."""
        self._task = None
        held, self._held = self._held, []
        for place in reversed(held):
            parameters, name, low, before = place
            if name in parameters and parameters[name] is low:
                parameters[name] = before
            else:
                self._held.insert(0, place)  # functional_call in backward puts the copy back

    def cast(self, value: Any) -> Any:
        """Convert the floating point tensors in a nest of arguments."""
        if self.dtype is None:
            return value
        if isinstance(value, torch.Tensor):
            return value.to(self.dtype) if value.is_floating_point() else value
        if isinstance(value, dict):
            new = copy.copy(value)  # of the same class, whatever its constructor takes
            if getattr(value, "__dict__", None) is value:
                new.__dict__ = new  # its items are its attributes
            for key, item in value.items():
                new[key] = self.cast(item)
            return new
        if isinstance(value, tuple) and hasattr(value, "_make"):
            return value._make(self.cast(item) for item in value)
        if isinstance(value, (list, tuple)):
            return type(value)(self.cast(item) for item in value)
        if is_dataclass(value) and not isinstance(value, type):
            return replace(
                value, **{f.name: self.cast(getattr(value, f.name)) for f in fields(value)}
            )
        return value
