"""Model averaging: average parameters periodically, instead of gradients at every step."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from hpcdist._ops import ReduceOp
from hpcdist.backends.dispatch import agreeing
from hpcdist.backends.refusal import refusing_parts
from hpcdist.groups import joining
from hpcdist.groups.comparison import digest, naming, same_arguments
from hpcdist.groups.numbers import steps, whole
from hpcdist.groups.resolve import member
from hpcdist.groups.state import ProcessGroup
from hpcdist.groups.subgroups import new_subgroups
from hpcdist.log import get_logger
from hpcdist.parallel.reducer.copies import unseen
from hpcdist.parallel.sync import unpack

API = "average_parameters"

__all__ = [
    "HierarchicalModelAverager",
    "ModelAverager",
    "PeriodicModelAverager",
    "average_parameters",
    "average_parameters_or_parameter_groups",
    "get_params_to_average",
]

_log = get_logger("averaging")

Parameters = Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]]


def get_params_to_average(params: Parameters) -> list[torch.nn.Parameter]:
    """The parameters that have a gradient.

    Local to this process.

    Parameters
    ----------
    params : iterable of torch.nn.Parameter or of dict
        Parameters, or parameter groups of an optimizer.

    Returns
    -------
    list of torch.nn.Parameter
        In their order.

    Raises
    ------
    TypeError
        If `params` contains anything else.

    Notes
    -----
    Source: ``torch.distributed.algorithms.model_averaging.utils.get_params_to_average``.
    """
    return [parameter for parameter in _flattened(params) if parameter.grad is not None]


def _flattened(params: Parameters) -> list[torch.nn.Parameter]:
    found = []
    for item in params:
        if isinstance(item, torch.nn.Parameter):
            found.append(item)
        elif isinstance(item, dict):
            found.extend(item["params"])
        else:
            raise TypeError(f"a parameter or parameter group is needed, not {type(item).__name__}")
    return found


def average_parameters(
    params: Iterable[torch.nn.Parameter], process_group: ProcessGroup | None = None
) -> None:
    """Replace parameters by their averages over all ranks of a group, in place.

    All ranks of the group must call it, with parameters of the same shapes and dtypes.

    Parameters
    ----------
    params : iterable of torch.nn.Parameter
        They keep their memory, so that views of them stay valid. The call temporarily uses as much
        memory again.
    process_group : ProcessGroup, optional
        None means the default group.

    Raises
    ------
    TypeError
        On all ranks, if a parameter is of integers, whose average is none.
    DistMismatchError
        On all ranks, if their parameters differ in number, shape or dtype.

    Notes
    -----
    Source: ``torch.distributed.algorithms.model_averaging.utils.average_parameters``.
    """
    _average(lambda: dict(enumerate(params)), process_group)


def average_parameters_or_parameter_groups(
    params: Parameters, process_group: ProcessGroup | None = None
) -> None:
    """Average those parameters that have a gradient.

    All ranks of the group must call it, with the same parameters in the same order, and gradients
    for the same ones.

    Parameters
    ----------
    params : iterable of torch.nn.Parameter or of dict
        Parameters, or parameter groups of an optimizer.
    process_group : ProcessGroup, optional
        None means the default group.

    Raises
    ------
    TypeError
        If `params` contains anything else, or a parameter is of integers. Ranks that have no such
        parameters raise DistMismatchError.
    DistMismatchError
        On all ranks, if other parameters have a gradient, or they differ in shape or dtype.

    Notes
    -----
    Source: the function of this name in ``torch.distributed.algorithms.model_averaging.utils``.
    """
    _average_trained(params, process_group, None)


def _average_trained(
    params: Parameters, process_group: ProcessGroup | None, step: int | None
) -> None:
    def those() -> dict[int, torch.Tensor]:
        every = _flattened(params)
        # Without any, the device tells through which backend the others call.
        nothing = {-1: every[0].detach().new_empty(0, dtype=torch.float32)} if every else {}
        return {i: p for i, p in enumerate(every) if p.grad is not None} or nothing

    _average(those, process_group, step)


def _average(
    those: Callable[[], Mapping[int, torch.Tensor]],
    process_group: ProcessGroup | None,
    step: int | None = None,
) -> None:
    """Average parameters by their place in a list; all ranks must have the same, and the step."""
    group = member(process_group)
    if group.size() == 1:
        those()
        return
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    untrained = set()
    with (
        naming("the step, and of each averaged parameter its place, shape and dtype"),
        torch.no_grad(),
        refusing_parts(agreeing(group.carrier), API, lambda: max(1, len(by_kind))),
    ):
        places = those()
        for parameter in places.values():
            tensor = parameter.detach()
            by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
            if not parameter.requires_grad:
                untrained.add(id(tensor))
        for dtype, _ in by_kind:
            if not (dtype.is_floating_point or dtype.is_complex):
                raise TypeError(
                    f"average_parameters takes floating point or complex numbers, not {dtype}: an "
                    "average of integers is not an integer"
                )
        # They travel as one, whose size alone would be compared.
        facts = digest(step, [(i, tuple(p.shape), str(p.dtype)) for i, p in places.items()])
        if not by_kind:
            group.carrier.all_reduce(np.zeros(0), ReduceOp.AVG, api=API, extra=facts)
        for tensors in by_kind.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            group.carrier.all_reduce(flat, ReduceOp.AVG, api=API, extra=facts)
            # those that are not trained are buffers, whose changes DDP does not count either
            with unseen(t for t in tensors if id(t) in untrained):
                unpack(flat, tensors)


class ModelAverager(ABC):
    """Base class: averages parameters periodically.

    Parameters
    ----------
    process_group : ProcessGroup, optional
        The ranks that average. None means the default group.

    Attributes
    ----------
    step : int
        How often :meth:`average_parameters` was called; the ranks that average have the same.
    """

    def __init__(self, process_group: ProcessGroup | None = None) -> None:
        self.process_group = member(process_group)
        self.step = 0

    def _compare(self, facts: Mapping[str, Any]) -> None:
        """Check that all ranks gave the same arguments; a former spare's peers have done so."""
        if not joining.is_closed(self.process_group):
            same_arguments(self.process_group, type(self).__name__, facts)

    @abstractmethod
    def average_parameters(self, params: Parameters) -> None:
        """Count a step, and average if one is due.

        All ranks of the group must call it.

        Parameters
        ----------
        params : iterable of torch.nn.Parameter or of dict
            Parameters, or parameter groups of an optimizer.

        Raises
        ------
        DistMismatchError
            On all ranks, if other parameters have a gradient, or this is another step for them.
        """


def _checked_warmup(warmup_steps: float) -> float:
    checked = steps(warmup_steps, "warmup_steps")
    if checked < 0:
        raise ValueError(f"warmup_steps must be 0 or more, not {checked}")
    return checked


def _warn_of_one(what: str) -> None:
    warnings.warn(
        f"{what} of 1 averages parameters at every step, which costs what averaging gradients "
        "costs: DistributedDataParallel alone is better then",
        stacklevel=3,
    )


class PeriodicModelAverager(ModelAverager):
    """Average parameters every few steps.

    All ranks of the group must make and use it in the same way.

    Parameters
    ----------
    period : int
        Steps from one average to the next, at least 1.
    warmup_steps : int
        Number of first steps without an average: those in which gradients are averaged.
    process_group : ProcessGroup, optional
        The ranks that average. None means the default group.

    Raises
    ------
    TypeError, ValueError
        If `period` or `warmup_steps` is not a whole number, or out of range.
    DistMismatchError
        On all ranks, if they give different ones.

    Notes
    -----
    Source: ``torch.distributed.algorithms.model_averaging.averagers.PeriodicModelAverager``.
    """

    def __init__(
        self, period: float, warmup_steps: float = 0, process_group: ProcessGroup | None = None
    ) -> None:
        super().__init__(process_group)
        warmup_steps = _checked_warmup(warmup_steps)
        period = steps(period, "period")
        if period < 1:
            raise ValueError(f"period must be 1 or more, not {period}")
        if period == 1:
            _warn_of_one("a period")
        facts = {"period": period, "warmup_steps": warmup_steps}
        self._compare(facts)
        self.period = period
        self.warmup_steps = warmup_steps

    def average_parameters(self, params: Parameters) -> None:
        if self.step >= self.warmup_steps and (self.step - self.warmup_steps) % self.period == 0:
            _average_trained(params, self.process_group, self.step)
        self.step += 1


class HierarchicalModelAverager(ModelAverager):
    """Average parameters often in small groups, and rarely in large ones.

    All ranks of the group must make and use it in the same way; making it makes groups.

    Parameters
    ----------
    period_group_size_dict : mapping of int to int
        Period in steps -> ranks that average together, both growing. The last one is the size of
        `process_group`. At a step that several periods divide, the longest counts.
    warmup_steps : int
        Steps at the beginning without any.
    process_group : ProcessGroup, optional
        All ranks that take part. None means the default group.

    Raises
    ------
    TypeError
        If a number is not a whole one.
    ValueError
        If the mapping is empty, its periods do not grow from 1 or more, its last size is not the
        group's, or `warmup_steps` is negative.
    DistMismatchError
        On all ranks, if they give different ones.

    Notes
    -----
    Source: the class of this name in
    ``torch.distributed.algorithms.model_averaging.hierarchical_model_averager``; Wang et al. 2020,
    arXiv:2010.12998.
    """

    def __init__(
        self,
        period_group_size_dict: Mapping[int, int] | None = None,
        warmup_steps: float = 0,
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(process_group)
        if not period_group_size_dict:
            raise ValueError("period_group_size_dict must not be empty")
        self.warmup_steps = warmup_steps = _checked_warmup(warmup_steps)
        size_of: dict[float, int] = {
            steps(period, "a period"): whole(size, f"the size of period {period}")
            for period, size in period_group_size_dict.items()
        }
        periods, sizes = list(size_of), list(size_of.values())
        if periods[0] < 1 or periods != sorted(periods):
            raise ValueError(f"periods must grow from 1 or more, not {periods}")
        if periods[-1] == 1:
            _warn_of_one("a longest period")
        everyone = self.process_group.size()
        if sizes[-1] != everyone:
            raise ValueError(
                f"the last value of period_group_size_dict is {sizes[-1]}, but the group has "
                f"{everyone} ranks"
            )
        facts = {"period_group_size_dict": size_of, "warmup_steps": warmup_steps}
        self._compare(facts)
        self.period_process_group_dict: dict[float, ProcessGroup] = {}
        for period, size in size_of.items():
            _log.info("%d ranks average parameters every %s steps", size, period)
            self.period_process_group_dict[period] = (
                self.process_group
                if size == everyone
                else new_subgroups(group_size=size, group=self.process_group)[0]
            )

    def average_parameters(self, params: Parameters) -> None:
        if self.step >= self.warmup_steps:
            due = [p for p in self.period_process_group_dict if self.step % p == 0]
            if due:
                group = self.period_process_group_dict[due[-1]]
                _average_trained(params, group, self.step)
        self.step += 1
