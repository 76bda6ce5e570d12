"""Steps of a ZeroRedundancyOptimizer inside DDP's backward."""

from __future__ import annotations

from typing import Any

import torch

from hpcdist.errors import DistError
from hpcdist.parallel.comm_hooks._arguments import check_in_buckets
from hpcdist.parallel.comm_hooks._buckets import begins, in_use, of_dtype
from hpcdist.parallel.comm_hooks._future import Driven
from hpcdist.parallel.comm_hooks.default import Hook
from hpcdist.parallel.reducer.bounded import give_up
from hpcdist.parallel.reducer.grad_bucket import GradBucket
from hpcdist.parallel.reducer.results import deliver_gradients
from hpcdist.parallel.sync import unpack
from hpcdist.parallel.zero import ZeroRedundancyOptimizer
from hpcdist.parallel.zero_arguments import API


class _Stepper:
    """Steps bucket after bucket, in the same order on all ranks."""

    def __init__(self, hook: Hook, zero: ZeroRedundancyOptimizer, interleaved: bool) -> None:
        self._hook = hook
        self._zero = zero
        self._interleaved = interleaved
        self._waiting: list[tuple[GradBucket, Any]] = []
        self._sent: list[tuple[Any, torch.Tensor, list[torch.Tensor]]] = []

    def __call__(self, state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if begins(bucket):
            self._zero.hook_ran = True
            self._zero._check_generation()
            self._zero._all_states = None
            # Left over from a backward pass that failed.
            self._waiting, self._sent = [], []
            bucket._after_pass(self._receive)  # DDP may leave out the last bucket
        if self._interleaved and bucket._unused() is not None:
            self._step_upto(None)
        self._waiting.append((bucket, bucket._bounded(self._hook(state, bucket))))
        return Driven(lambda: self._finish(bucket), lambda: self._give_up(bucket))

    def _finish(self, bucket: GradBucket) -> torch.Tensor:
        self._step_upto(bucket)
        if bucket.is_last():
            self._receive()
        return bucket.buffer()

    def _give_up(self, bucket: GradBucket) -> None:
        """Step no further; take what the owners have stepped in backward and sent already."""
        for waiting in self._waiting:
            if waiting[0] is bucket:
                give_up(waiting[1])
                self._waiting.remove(waiting)
                break
        self._receive()

    def _receive(self) -> None:
        with torch.no_grad():
            while self._sent:
                work, flat, members = self._sent[0]
                try:
                    work.wait()
                except DistError:
                    del self._sent[0]
                    raise
                unpack(flat, members)
                del self._sent[0]

    def _step_upto(self, last: GradBucket | None) -> None:
        if last is not None and not any(bucket is last for bucket, _ in self._waiting):
            return
        while self._waiting:
            bucket, future = self._waiting.pop(0)
            deliver_gradients(future.wait(), bucket.buffer())
            self._step(bucket)
            if bucket is last:
                return

    def _step(self, bucket: GradBucket) -> None:
        zero = self._zero
        by_owner: dict[int, list[torch.Tensor]] = {}
        for parameter, gradient in in_use(bucket):
            owner = zero._owner.get(parameter)
            if owner is None:
                continue  # averaged by DDP, and not this optimizer's
            by_owner.setdefault(owner, []).append(parameter)
            if owner == zero.rank:
                parameter.grad = of_dtype(gradient, parameter)
        if zero.rank in by_owner:
            zero._step_some(by_owner[zero.rank])
        if zero.world_size == 1:
            return
        with torch.no_grad():
            for owner, members in sorted(by_owner.items()):
                flat = torch.cat([p.detach().reshape(-1) for p in members])
                work = zero.process_group.carrier.broadcast(flat, owner, True, api=API)
                self._sent.append((work, flat, [p.detach() for p in members]))


def _wrapped(hook: Hook, ddp: Any, zero: ZeroRedundancyOptimizer, interleaved: bool) -> Hook:
    if not zero.overlap_with_ddp:
        raise ValueError("the ZeroRedundancyOptimizer must be made with overlap_with_ddp=True")
    trained = {p for p in ddp.parameters() if p.requires_grad}
    foreign = [p for p in zero._owner if p.requires_grad and p not in trained]
    if foreign:
        raise ValueError(
            f"{len(foreign)} parameters of the optimizer are not the DDP model's, so nothing would "
            "step them"
        )
    check_in_buckets(ddp, zero._owner)
    zero.hooked = True
    return _Stepper(hook, zero, interleaved)


def hook_with_zero_step(
    hook: Hook, ddp: Any, zero: ZeroRedundancyOptimizer, shard_buckets: bool = False
) -> Hook:
    """Let an optimizer's steps follow a hook when backward is over, bucket by bucket.

    While the first buckets are stepped and their parameters sent, the last are still being
    averaged. Local; DDP calls what it returns on all ranks.

    Parameters
    ----------
    hook : callable
        What averages, such as :func:`allreduce_hook`.
    ddp : DistributedDataParallel
        Whose parameters `zero` optimizes.
    zero : ZeroRedundancyOptimizer
        Made with ``overlap_with_ddp=True``, and with the same group.
    shard_buckets : bool
        Ignored: each parameter has its rank, whatever bucket it is in.

    Returns
    -------
    callable
        A hook with the state of `hook`, for ``ddp.register_comm_hook``.

    Raises
    ------
    ValueError
        If `zero` was made without ``overlap_with_ddp``, or has parameters that `ddp` has not, or
        has in no bucket: those that are delayed or ignored.

    Notes
    -----
    Source: ``torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook.hook_with_zero_step``, which
    does not step in the first iterations.

    Examples
    --------
    >>> zero = ZeroRedundancyOptimizer(
    ...     model.parameters(), torch.optim.Adam, overlap_with_ddp=True, lr=1e-3
    ... )
    >>> model.register_comm_hook(None, hook_with_zero_step(allreduce_hook, model, zero))
    """
    return _wrapped(hook, ddp, zero, False)


def hook_with_zero_step_interleaved(
    hook: Hook, ddp: Any, zero: ZeroRedundancyOptimizer, shard_buckets: bool = False
) -> Hook:
    """Let an optimizer's steps follow a hook while backward goes on.

    Each bucket is stepped when the next one is full. Pays where averaging is fast compared with
    backward, because it waits for it. Local; DDP calls what it returns on all ranks.

    Parameters
    ----------
    hook, ddp, zero, shard_buckets
        As for :func:`hook_with_zero_step`.

    Returns
    -------
    callable
        A hook with the state of `hook`, for ``ddp.register_comm_hook``.

    Raises
    ------
    ValueError
        See :func:`hook_with_zero_step`.

    Notes
    -----
    Source: the function of this name in
    ``torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook``.
    """
    return _wrapped(hook, ddp, zero, True)
