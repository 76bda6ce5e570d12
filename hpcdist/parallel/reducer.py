"""Averages gradients between ranks while backward still runs.

Every parameter carries a hook that autograd calls once its gradient has been accumulated. The
hook counts down the parameter's bucket; full buckets are packed and their all-reduce is started,
strictly in index order, because all ranks must start the same collectives in the same order while
their hooks may fire in different ones. When backward is over, a callback of the autograd engine
waits for the all-reduces and copies the averages back.

How the reducer knows that a backward pass concerns it: ``expect`` is called by forward, and it puts
a hook on each output tensor. The output's hook runs before any parameter's and in the outermost
backward pass (a nested one, from re-entrant checkpointing, has an end of its own, which would be
too early). Gradients that arrive unannounced (``no_sync``, or the bare module used on its own)
stay local.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from hpcdist.errors import DistError, DistMismatchError, DistTimeoutError
from hpcdist.parallel.bucket import Allocator, Bucket, allocate, assign_buckets
from hpcdist.parallel.grad_bucket import GradBucket
from hpcdist.work import ReduceOp

__all__ = ["Reducer"]

API = "DistributedDataParallel"
# What peers see when this rank's backward ended before all buckets were full.
API_ABANDON = "DistributedDataParallel: backward ended without all gradients"

_current_graph_task = torch._C._current_graph_task_id  # -1 outside of backward
_MAX_NAMES = 50


class Reducer:
    """Gradient averaging for a fixed list of parameters.

    Parameters
    ----------
    named_parameters : sequence of (str, torch.nn.Parameter)
        Those that require gradients, in registration order, the same on every rank.
    group : ProcessGroup
        Between whose ranks gradients are averaged.
    caps : sequence of int
        Bucket sizes in bytes, see :func:`assign_buckets`.
    as_view : bool
        Let gradients be views of the buckets.
    allocator : callable
        Where buckets get their memory, see :func:`hpcdist.parallel.bucket.allocate`.

    Attributes
    ----------
    buckets : list of Bucket
        In the order in which they are reduced.
    wait_seconds : float
        Time this rank has spent at the end of backward waiting for other ranks and for data, since
        construction: communication that backward did not hide.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, torch.nn.Parameter]],
        group: Any,
        caps: Sequence[int],
        as_view: bool = False,
        allocator: Allocator = allocate,
    ) -> None:
        self._names = [name for name, _ in named_parameters]
        self._parameters = [p for _, p in named_parameters]
        self._group = group
        # Backward meets the parameters roughly in the reverse of the order of registration.
        order = range(len(self._parameters) - 1, -1, -1)
        self.buckets = [
            Bucket(members, [self._parameters[i] for i in members], as_view, allocator)
            for members in assign_buckets(self._parameters, order, caps)
        ]
        self._bucket_of = [self.buckets[0]] * len(self._parameters)
        for bucket in self.buckets:
            for index in bucket.members:
                self._bucket_of[index] = bucket
        self.wait_seconds = 0.0

        self._expected = False  # a forward has announced a backward
        self._task: int | None = None  # autograd's number of the backward under way
        self._ready = bytearray(len(self._parameters))
        self._count = 0  # how many of them are ready
        self._next = 0  # first bucket not started
        self._failure: BaseException | None = None
        self._hook: tuple[Any, Callable[[Any, GradBucket], Any]] | None = None

        # The hooks live as long as the parameters, and hold the reducer only weakly: with the
        # reducer gone, another one can take over the same module.
        this = weakref.ref(self)
        handles = [
            parameter.register_post_accumulate_grad_hook(_make_hook(this, index))
            for index, parameter in enumerate(self._parameters)
        ]
        weakref.finalize(self, _remove, handles).atexit = False

    @property
    def has_hook(self) -> bool:
        """Whether a communication hook is registered."""
        return self._hook is not None

    def set_hook(self, state: Any, hook: Callable[[Any, GradBucket], Any]) -> None:
        """Let `hook` move the buckets from now on."""
        self._hook = (state, hook)

    # -- called by forward --------------------------------------------------------------------

    def check(self) -> None:
        """Refuse to start another forward on top of a backward that went wrong.

        A backward pass that an exception ended is wound up here, which every rank must do: forward
        on all of them. Peers that still wait for this rank's gradients get an error.

        Raises
        ------
        DistError
            If reducing gradients failed earlier, on this rank or on a peer of it.
        """
        if self._task is not None and _current_graph_task() == -1:
            self._abandon()
        if self._failure is not None:
            raise DistError(
                f"Expected to have finished reduction in the prior iteration, but on rank "
                f"{self._me()} an earlier backward pass failed "
                f"({type(self._failure).__name__}: {self._failure}), so gradients and parameters "
                "may differ between ranks. To go on, wrap the module in a new "
                "DistributedDataParallel on all ranks, which copies rank 0's parameters to all."
            ) from self._failure

    def expect(self, output: Any) -> None:
        """Announce that the backward of `output` is to average gradients."""
        self._expected = True
        for tensor in _tensors(output):
            # A parameter that is returned as it is would keep the hook for ever.
            if tensor.grad_fn is not None:
                tensor.register_hook(lambda _grad: self._arm())

    def keep_local(self) -> None:
        """Announce that the next backward is to leave gradients alone."""
        self._expected = False

    # -- called by autograd --------------------------------------------------------------------

    def _arm(self) -> None:
        """Take note of the backward pass under way, and ask to be called at its end."""
        task = _current_graph_task()
        # No gradient seen yet: nothing to lose by moving on to this pass from one that failed.
        if self._task is None or (self._count == 0 and self._task != task):
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)

    def _on_gradient(self, index: int) -> None:
        """Count one gradient, and start every bucket whose turn has come."""
        if self._task is None:
            if not self._expected:
                return
            self._arm()
        if torch.is_grad_enabled():
            raise DistError(
                "DistributedDataParallel does not support backward(create_graph=True): gradients "
                "of gradients would not be averaged between ranks. Use torch.autograd.grad for the "
                "inner derivative, or call backward(create_graph=True) under no_sync()."
            )
        if self._ready[index]:
            raise DistError(
                f"Expected to mark a variable ready only once: parameter {self._names[index]} got "
                "its gradient a second time in one backward pass, after its first one was taken "
                "for averaging. This happens when it is used outside of the wrapped module's "
                "forward, or in several re-entrant activation checkpoints: use "
                "torch.utils.checkpoint with use_reentrant=False."
            )
        gradient = self._parameters[index].grad
        if gradient is not None and gradient.is_sparse:
            raise DistError(
                f"parameter {self._names[index]} has a sparse gradient, which "
                "DistributedDataParallel does not average; create the embedding with sparse=False"
            )
        self._ready[index] = 1
        self._count += 1
        self._bucket_of[index].pending -= 1
        while self._next < len(self.buckets) and self.buckets[self._next].pending == 0:
            bucket = self.buckets[self._next]
            bucket.pack()
            self._next += 1
            if self._hook is None:
                bucket.work = self._group._comm.all_reduce(
                    bucket.buffer, ReduceOp.AVG, True, api=API
                )
            else:
                state, hook = self._hook
                last = self._next == len(self.buckets)
                bucket.work = hook(state, GradBucket(bucket, self._next - 1, last))

    def _end_of_backward(self) -> None:
        """Wait for the averages and hand them out; runs once, after the last gradient."""
        if self._count == 0:
            self._task = None  # torch.autograd.grad: no gradient was accumulated anywhere
            return
        if self._next < len(self.buckets):
            missing = [i for i, ready in enumerate(self._ready) if not ready]
            self._abandon()
            raise DistError(self._unused_message(missing))
        try:
            with torch.no_grad():
                for bucket in self.buckets:
                    began = time.perf_counter()
                    result = bucket.work.wait()
                    self.wait_seconds += time.perf_counter() - began
                    if self._hook is not None and result.data_ptr() != bucket.buffer.data_ptr():
                        bucket.buffer.copy_(result)
                    bucket.unpack()
        except BaseException as error:
            self._failure = error
            if isinstance(error, DistMismatchError):
                # The group goes on: let what is under way come to its end, whatever that is. After
                # other errors that could take a timeout for each bucket.
                for bucket in self.buckets:
                    self._settle(bucket.work.wait)
            raise
        finally:
            self._reset()

    # -- when something went wrong -------------------------------------------------------------

    def _abandon(self) -> None:
        """Wind up a backward pass that will never fill the remaining buckets.

        Peers may be waiting in the all-reduces that this rank never started. Starting those with
        what is there would be a lie, and starting nothing would leave peers until their timeout or,
        worse, pair their buckets with this rank's next ones. So this rank enters a barrier in
        place of each: where a peer is in an all-reduce, the entry check raises on both sides, and
        where all ranks gave up at the same bucket, the barriers match and nothing is lost.
        """
        try:
            for bucket in self.buckets[: self._next]:
                self._settle(bucket.work.wait)
            if self._group._comm.check > 0:  # unchecked, a barrier would corrupt the peers' sums
                for _ in self.buckets[self._next :]:
                    if not isinstance(self._failure, DistTimeoutError):
                        self._settle(lambda: self._group._comm.barrier(api=API_ABANDON))
            elif self._next < len(self.buckets) and self._group.size() > 1:
                self._failure = DistError(
                    "backward ended before all buckets were reduced, and with the entry check off "
                    "there is no safe way to tell the other ranks"
                )
        finally:
            self._reset()

    def _settle(self, call: Callable[[], Any]) -> None:
        """Make a blocking call and keep its error, if it is the first."""
        try:
            call()
        except DistError as error:
            if self._failure is None:
                self._failure = error

    def _reset(self) -> None:
        self._expected = False
        self._task = None
        self._ready = bytearray(len(self._parameters))
        self._count = 0
        self._next = 0
        for bucket in self.buckets:
            bucket.reset()

    def _unused_message(self, missing: list[int]) -> str:
        names = [
            self._names[i]
            + ("" if self._parameters[i].requires_grad else " (its requires_grad is now False)")
            for i in missing
        ]
        more = len(names) - _MAX_NAMES
        if more > 0:
            names[_MAX_NAMES:] = [f"and {more} more"]
        return (
            "Expected to have finished reduction in the prior iteration before starting a new one: "
            f"on rank {self._me()}, backward ended without a gradient for {len(missing)} of "
            f"{len(self._names)} parameters: {', '.join(names)}. They took no part in the loss, so "
            "there is nothing to average, and this pass's gradients must not be used. Use every "
            "parameter in forward and every output in the loss, or call requires_grad_(False) on "
            "parameters that are not trained before the module is wrapped."
        )

    def _me(self) -> int:
        return self._group._ranks[self._group.rank()]


def _make_hook(this: weakref.ref[Reducer], index: int) -> Callable[[torch.Tensor], None]:
    def hook(_parameter: torch.Tensor) -> None:
        reducer = this()
        if reducer is not None:
            reducer._on_gradient(index)

    return hook


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in any nest of lists, tuples, dicts and dataclasses."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, (list, tuple)):
        for item in output:
            yield from _tensors(item)
    elif isinstance(output, dict):
        for item in output.values():
            yield from _tensors(item)
    elif is_dataclass(output) and not isinstance(output, type):
        for field in fields(output):
            yield from _tensors(getattr(output, field.name))
