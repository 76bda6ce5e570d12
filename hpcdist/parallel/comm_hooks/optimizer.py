"""Optimizer steps in the middle of backward, for each bucket as soon as it is averaged."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

from hpcdist._ops import ReduceOp
from hpcdist.errors import DistError
from hpcdist.groups.state import ProcessGroup
from hpcdist.parallel.comm_hooks._arguments import check_state, group_of
from hpcdist.parallel.comm_hooks._buckets import begins, dense_buffer, in_use, of_dtype
from hpcdist.parallel.comm_hooks._future import Driven
from hpcdist.parallel.comm_hooks.default import Hook
from hpcdist.parallel.reducer.bounded import give_up
from hpcdist.parallel.reducer.grad_bucket import GradBucket
from hpcdist.parallel.reducer.results import deliver_gradients


class _Together:
    """Several optimizers of one parameter, as one."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    def step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()


class OptimizerInBackward:
    """State of :func:`optimizer_in_backward_hook`: an optimizer for each parameter.

    All ranks must make it, with the same arguments; making it is local.

    Parameters
    ----------
    optimizer_class : type
        Derived from ``torch.optim.Optimizer``.
    params : iterable of torch.nn.Parameter
        The parameters to optimize. Others of the model are averaged only.
    process_group : ProcessGroup, optional
        The group that averages. None means the default group.
    **options
        Passed to the optimizer's constructor, such as ``lr``.

    Attributes
    ----------
    optimizers : dict
        Parameter -> its optimizer, for learning rate schedules and state dicts.

    Notes
    -----
    The gradients of these parameters are None after backward, and there is no ``step()`` to call.
    Source: ``torch.distributed.optim._apply_optimizer_in_backward``.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        params: Iterable[torch.nn.Parameter],
        process_group: ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        self.process_group = process_group
        self.optimizers: dict[torch.nn.Parameter, Any] = {
            p: optimizer_class([p], **options) for p in params
        }
        self._waiting: deque[tuple[Any, GradBucket]] = deque()

    @classmethod
    def attached(
        cls, params: Iterable[torch.nn.Parameter], process_group: ProcessGroup
    ) -> OptimizerInBackward:
        """Take over what ``torch.distributed.optim._apply_optimizer_in_backward`` has attached.

        Its hooks step as soon as a gradient is accumulated, that is, before it is averaged, so they
        are taken off. Local to this process.

        Parameters
        ----------
        params : iterable of torch.nn.Parameter
            Those that DDP averages. Those without an optimizer are averaged only.
        process_group : ProcessGroup
            The group that averages.

        Returns
        -------
        OptimizerInBackward
            With the attached optimizers.
        """
        from torch.distributed.optim.apply_optimizer_in_backward import (
            param_to_optim_hook_handle_map as handles,
        )

        state = cls(torch.optim.SGD, (), process_group)
        for parameter in params:
            for handle in handles.get(parameter, ()):
                handle.remove()
            attached = getattr(parameter, "_in_backward_optimizers", None)
            if attached:
                state.optimizers[parameter] = _Together(attached)
        return state

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the states of all optimizers.

        Local to this process.

        Returns
        -------
        list of dict
            In the order of the parameters.
        """
        return [optimizer.state_dict() for optimizer in self.optimizers.values()]

    def load_state_dict(self, state_dict: list[dict[str, Any]]) -> None:
        """Load the result of :meth:`state_dict`.

        Local to this process.

        Parameters
        ----------
        state_dict : list of dict
            Of as many parameters.

        Raises
        ------
        ValueError
            If the numbers differ.
        """
        if len(state_dict) != len(self.optimizers):
            raise ValueError(
                f"a state of {len(state_dict)} optimizers for {len(self.optimizers)} parameters"
            )
        for optimizer, state in zip(self.optimizers.values(), state_dict, strict=True):
            optimizer.load_state_dict(state)

    def _step(self, bucket: GradBucket) -> None:
        with torch.enable_grad():  # as in a training loop: an optimizer turns it off by itself
            for parameter, gradient in in_use(bucket):
                optimizer = self.optimizers.get(parameter)  # type: ignore[call-overload]
                if optimizer is not None:
                    parameter.grad = of_dtype(gradient, parameter)
                    optimizer.step()

    def _finish(self, upto: GradBucket | None) -> None:
        """Step with all buckets up to one, waiting for them; or with those that are there."""
        while self._waiting:
            work, bucket = self._waiting[0]
            if upto is None and not (work.is_completed() and self._may_step(bucket)):
                return
            try:
                work.wait()
            except DistError:
                self._waiting.popleft()
                raise
            self._waiting.popleft()
            self._step(bucket)
            if bucket is upto:
                return

    @staticmethod
    def _may_step(bucket: GradBucket) -> bool:
        """Whether it is known which parameters no rank uses: none that this rank does."""
        return not bucket._bucket.unused or bucket._unused() is not None

    def _forget_gradients(self) -> None:
        self._waiting.clear()
        self._clear_gradients()

    def _clear_gradients(self) -> None:
        for parameter in self.optimizers:
            parameter.grad = None


def optimizer_in_backward_hook(
    state: OptimizerInBackward, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the gradients, and take the optimizer's step at once.

    DDP calls it on all ranks, for each bucket. Steps run while backward computes the rest, so a
    second backward through the same graph is not possible.

    Parameters
    ----------
    state : OptimizerInBackward
        The optimizers.
    bucket : GradBucket
        From DDP.

    Returns
    -------
    torch.futures.Future
        The averages.

    Notes
    -----
    Source: the private hook of ``torch.distributed.algorithms.ddp_comm_hooks`` behind
    ``torch.distributed.optim._apply_optimizer_in_backward``.
    """
    check_state(state, OptimizerInBackward, "optimizer_in_backward_hook")
    buffer = dense_buffer(bucket, "optimizer_in_backward_hook")
    group = group_of(state.process_group)
    if begins(bucket):
        state._waiting.clear()  # left over from a backward pass that failed
        bucket._after_pass(state._forget_gradients)
    state._finish(None)
    work = group.carrier.all_reduce(buffer, ReduceOp.AVG, True, api="optimizer_in_backward_hook")
    state._waiting.append((work, bucket))

    def finish() -> torch.Tensor:
        if any(waiting is bucket for _, waiting in state._waiting):
            state._finish(bucket)
        return buffer

    def give_up() -> None:
        # The others may have stepped with this bucket already: it was averaged in time there.
        finish()
        state._clear_gradients()

    return Driven(finish, give_up)


class OptimizerHookState:
    """State for :func:`hook_then_optimizer`: something that can step one parameter.

    Local to this process.

    Parameters
    ----------
    functional_optim : object
        With a method ``step_param(parameter, gradient)``.
    params : iterable of torch.nn.Parameter, optional
        Those to step. Default: all.

    Raises
    ------
    ValueError
        If there is no such method.

    Notes
    -----
    Source: ``torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks``.
    """

    def __init__(
        self, functional_optim: Any, params: Iterable[torch.nn.Parameter] | None = None
    ) -> None:
        if not callable(getattr(functional_optim, "step_param", None)):
            raise ValueError(
                f"{type(functional_optim).__name__} must have a method "
                "step_param(parameter, gradient)"
            )
        self.functional_optimizer = functional_optim
        self.params_to_optimize = None if params is None else set(params)


def hook_then_optimizer(hook: Hook, optimizer_state: OptimizerHookState) -> Hook:
    """Let an optimizer step follow a hook, bucket by bucket.

    Local; DDP calls what it returns on all ranks.

    Parameters
    ----------
    hook : callable
        What averages.
    optimizer_state : OptimizerHookState
        What steps.

    Returns
    -------
    callable
        A hook with the state of `hook`.

    Notes
    -----
    Source: ``torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks``.
    """

    def hook_and_step(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        future = bucket._bounded(hook(state, bucket))

        def step() -> torch.Tensor:
            result = future.wait()
            buffer = bucket.buffer()
            deliver_gradients(result, buffer)
            chosen = optimizer_state.params_to_optimize
            for parameter, gradient in in_use(bucket):
                if chosen is None or parameter in chosen:
                    gradient = of_dtype(gradient, parameter)
                    optimizer_state.functional_optimizer.step_param(parameter, gradient)
            return buffer

        return Driven(step, lambda: give_up(future))

    return hook_and_step
