"""Averaging gradients among all ranks at first, and in small groups later."""

from __future__ import annotations

from typing import Any

import torch

from hpcdist.groups.numbers import steps, yes_or_no
from hpcdist.groups.state import ProcessGroup
from hpcdist.groups.subgroups import new_subgroups
from hpcdist.log import get_logger
from hpcdist.parallel.comm_hooks._arguments import check_state, group_of
from hpcdist.parallel.comm_hooks._buckets import dense_buffer
from hpcdist.parallel.comm_hooks._counting import Counting, counted
from hpcdist.parallel.comm_hooks.default import average, noop_hook
from hpcdist.parallel.comm_hooks.powersgd_checks import counter
from hpcdist.parallel.reducer.grad_bucket import GradBucket
from hpcdist.parallel.reducer.transfer import PLACES

API = "post_localSGD_hook"
_log = get_logger("comm_hooks")


class PostLocalSGDState(Counting):
    """State of :func:`post_localSGD_hook`.

    All ranks must make it, with the same arguments.

    Parameters
    ----------
    process_group : ProcessGroup, optional
        The ranks that average in the first steps. None means the default group.
    subgroup : ProcessGroup, optional
        The ranks that average later; every rank passes its own. None makes one group per node.
    start_localSGD_iter : int
        Number of steps before that.
    post_local_gradient_allreduce : bool
        False: afterwards gradients are not averaged at all.

    Raises
    ------
    TypeError
        If `start_localSGD_iter` is not a whole number, or a flag is not a boolean.

    Notes
    -----
    Source: ``torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook.PostLocalSGDState``,
    which makes its groups in the middle of a backward pass.
    """

    def __init__(
        self,
        process_group: ProcessGroup | None,
        subgroup: ProcessGroup | None,
        start_localSGD_iter: int,
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        self.start_localSGD_iter = steps(start_localSGD_iter, "start_localSGD_iter")
        self.process_group = process_group
        averages = yes_or_no(post_local_gradient_allreduce, "post_local_gradient_allreduce")
        if subgroup is None and averages:
            subgroup = new_subgroups(group=process_group)[0]
        self.subgroup = subgroup
        self.post_local_gradient_allreduce = averages
        self.iter = 0

    def state_dict(self) -> dict[str, Any]:
        """Return what changes with the steps: their number, as ``"iter"``.

        Local to this process. The groups and settings are the constructor's.

        Returns
        -------
        dict
            For :meth:`load_state_dict`; the same on all ranks between two steps.
        """
        return {"iter": self.iter}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`; all ranks must.

        Parameters
        ----------
        state_dict : dict
            Of a state with the same settings.

        Raises
        ------
        TypeError
            If the number of steps is no whole number.
        ValueError
            If it is negative or missing, or there is something else. The state is as before then.
        """
        if set(state_dict) != {"iter"}:
            raise ValueError(f"no state of post-local SGD: it has {sorted(state_dict)}, not 'iter'")
        self.iter = int(counter(state_dict["iter"], "iter"))

    def _count_step(self) -> None:
        super()._count_step()
        if self.iter == self.start_localSGD_iter:
            _log.info("local SGD starts after %d steps", self.iter)


def post_localSGD_hook(
    state: PostLocalSGDState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average gradients globally for some steps, then among the ranks of a small group only.

    DDP calls it on all ranks, for each bucket. It needs something that averages parameters between
    the small groups: :class:`hpcdist.optim.PostLocalSGDOptimizer`, or an averager of
    ``hpcdist.parallel.averaging``, with the same number of first steps.

    Parameters
    ----------
    state : PostLocalSGDState
        Which groups, and when.
    bucket : GradBucket
        From DDP.

    Returns
    -------
    torch.futures.Future
        The averages.

    Notes
    -----
    Source: ``torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook``; Lin et al. 2018,
    arXiv:1808.07217.
    """
    check_state(state, PostLocalSGDState, "post_localSGD_hook")
    if state.iter < state.start_localSGD_iter:
        group = group_of(state.process_group)
        return counted(state, bucket, average(group, dense_buffer(bucket, API), API))
    if not state.post_local_gradient_allreduce:
        return noop_hook(None, bucket)
    return average(group_of(state.subgroup), dense_buffer(bucket, API), API)


def _place(state: object, group: ProcessGroup) -> ProcessGroup | None:
    """Return the group in which the next pass averages gradients."""
    if not isinstance(state, PostLocalSGDState):
        return group  # which the hook refuses
    if state.iter < state.start_localSGD_iter:
        return group_of(state.process_group)
    return group_of(state.subgroup) if state.post_local_gradient_allreduce else None


PLACES.append((post_localSGD_hook, _place))
