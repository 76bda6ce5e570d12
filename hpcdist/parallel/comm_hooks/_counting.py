"""States of communication hooks that count steps."""

from __future__ import annotations

from typing import Any

import torch

from hpcdist.parallel.comm_hooks._buckets import begins
from hpcdist.parallel.reducer.grad_bucket import GradBucket


class Counting:
    """A state that counts steps, each when its last average is there: see :func:`counted`.

    Attributes
    ----------
    iter : int
        Steps so far.
    """

    iter: int

    def maybe_increase_iter(self, bucket: GradBucket) -> None:
        """Count a step with its last bucket.

        Local.

        Parameters
        ----------
        bucket : GradBucket
            The bucket at hand.
        """
        if bucket.is_last():
            self._count_step()

    def _count_step(self) -> None:
        self.iter += 1


def count_left_out(state: Counting, bucket: GradBucket) -> None:
    """Let a state count, at the end, a pass whose last bucket DDP leaves out."""
    after, before = getattr(bucket, "_after_pass", None), state.iter
    if after is not None and begins(bucket):
        after(lambda: state._count_step() if state.iter == before else None)


def counted(state: Counting, bucket: GradBucket, average: Any) -> Any:
    """Let a state count a step when its last average is there.

    Not when it begins: in a pass that is given up, only some ranks may have come so far.
    """

    count_left_out(state, bucket)

    def count(done: Any) -> torch.Tensor:
        state.maybe_increase_iter(bucket)
        return done.value()

    return average.then(count)
