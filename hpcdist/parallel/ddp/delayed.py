"""Delayed all-reduce: averages some gradients together when a chosen one is computed.

The group's calls have to be in one order on all ranks, while the gradients' order may differ. So a
delayed reduction begins after the last bucket of the reducer, whichever comes later; or at the end
of the pass, on a rank on which the chosen parameter gets no gradient.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from hpcdist._engine import counting
from hpcdist._graph import run_last
from hpcdist._ops import ReduceOp
from hpcdist.backends.dispatch import serving
from hpcdist.errors import DistError
from hpcdist.groups.process_group import ProcessGroup
from hpcdist.parallel.reducer.bucket import GIVEN_UP, Bucket
from hpcdist.parallel.reducer.failure import API_ABANDON, current_backward, watch
from hpcdist.parallel.reducer.graph import find_tensors, may_accumulate
from hpcdist.parallel.reducer.texts import create_graph, earlier_failure
from hpcdist.parallel.reducer.unused import Usage

#: Another name than that of the reducer's buckets, which the entry check must not take them for.
API = counting("DistributedDataParallel: delayed gradients", "backward pass")
#: The same where an exception ended backward on this rank when the averages were on their way.
API_GIVEN_UP = "DistributedDataParallel: delayed gradients after a backward that an exception ended"


class DelayedReduction:
    """Averages the gradients of some parameters when another parameter's gradient is computed.

    The gradients become views of buffers, one for each dtype. The averages are in place when
    backward ends.

    Parameters
    ----------
    named_parameters : sequence of (str, torch.nn.Parameter)
        Parameters whose gradients wait; all gradients must exist when the trigger's is computed.
    trigger : torch.nn.Parameter
        The one whose gradient starts the reduction; it may be among the others.
    group : ProcessGroup
        Between whose ranks.
    reducer : Reducer, optional
        What averages the other parameters.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, torch.nn.Parameter]],
        trigger: torch.nn.Parameter,
        group: ProcessGroup,
        reducer: Any = None,
    ) -> None:
        self._names = [name for name, _ in named_parameters]
        self._parameters = [p for _, p in named_parameters]
        self._group = group
        self._reducer = reducer
        others = [] if reducer is None else reducer.parameters  # at its end all of these begin
        self._leaves = [*self._parameters, trigger, *others]
        self._usage = Usage(self._parameters, local=False)
        self._works: list[Any] = []  # in flight
        self._generation = group.members.generation
        self._expected = False  # a forward has announced a backward
        self._task: int | None = None  # autograd's number of the current backward
        self._accumulates = False  # the pass does, and no reducer tells whether others' do
        self._averages = False  # other ranks may wait for its gradients
        self._begun = False  # one of the gradients of the pass is there
        self._packed = False  # they are complete, and wait for their turn
        self._deferred = False  # the end of the pass waits for the reducer's
        self._left_behind = False  # reductions in flight of a backward that raised
        self._passes = 0
        self._whole = False  # all reductions of the pass are in flight, so that others get averages
        self._given_up = 0  # how many passes an exception ended here when they were
        self._failed: DistError | None = None  # what the averages of a pass were lost by
        kinds: dict[Any, list[int]] = {}
        for index, p in enumerate(self._parameters):
            kinds.setdefault((p.dtype, p.device), []).append(index)
        self._buckets = [
            Bucket(members, [self._parameters[i] for i in members], as_view=True)
            for members in kinds.values()
        ]
        self._handles = [
            p.register_post_accumulate_grad_hook(partial(self._on_gradient, index))
            for index, p in enumerate(self._parameters)
        ]
        # After its own gradient was added, and not in torch.autograd.grad, which adds none.
        self._handles.append(trigger.register_post_accumulate_grad_hook(self._start))
        self._all_hooks: list[Any] = [
            p._post_accumulate_grad_hooks for p in (*self._parameters, trigger)
        ]
        if reducer is not None:
            reducer.call_after_buckets(self._begin, self._complete, self._wait)

    def detach(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._all_hooks = [], []
        if self._reducer is not None:
            self._reducer.call_after_buckets(None, None, None)

    # -- called by forward ---------------------------------------------------------------------

    def check(self) -> None:
        """Finish a reduction that an exception in backward left behind.

        Raises
        ------
        DistError
            If that or an earlier one failed, on this rank or on a peer.
        """
        if self._task is not None and current_backward() == -1:
            self.cut_off(self._task)
            self._task, self._deferred = None, False
        if self._generation != self._group.members.generation:
            # The ranks that are left go on, and what they have reduced so far may differ.
            with suppress(DistError):
                self._finish()
            self._generation, self._passes = self._group.members.generation, 0
            self._given_up, self._failed = 0, None
        elif self._left_behind:
            self._finish()
        if self._failed is not None:
            rank = self._group.members.ranks[self._group.rank()]
            raise DistError(earlier_failure(rank, self._failed)) from self._failed

    def expect(self, output: Any) -> None:
        """Announce that the backward of `output` averages."""
        self._expected = True
        tensors = list(find_tensors(output))
        if not tensors:
            self._run_last()  # no output announces the pass
        if self._reducer is None:
            self._usage.search([t for t in tensors if t.requires_grad], mark=False)
        for tensor in tensors:
            if tensor.grad_fn is not None:
                tensor.register_hook(self._arm)

    def keep_local(self) -> None:
        """Announce that the next backward does not average."""
        self._expected = False

    # -- called by autograd --------------------------------------------------------------------

    def _arm(self, _gradient: Any = None) -> None:
        """Let the current backward average; that of a forward's output, or an announced one."""
        task = current_backward()
        # A pass that raised before any of the gradients came is replaced by this one.
        if self._task is None or (self._task != task and not self._begun):
            if self._left_behind:
                self._finish()
            self._run_last()
            self._task = task
            self._accumulates = self._usage.will_accumulate()
            self._averages = self._accumulates or may_accumulate(self._leaves)
            watch(self)

    def _run_last(self) -> None:
        run_last(self._all_hooks, [handle.id for handle in self._handles])

    @property
    def _in_flight(self) -> bool:
        return bool(self._works)

    def _on_gradient(self, index: int, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._usage.note(index)  # under no_sync, too: the next pass averages it
        if self._task is None:
            if not self._expected:
                return
            self._arm()
        if torch.is_grad_enabled():
            raise DistError(create_graph())
        self._begun = self._averages = True
        if self._packed:
            raise DistError(
                f"the gradient of {self._names[index]}, of delay_all_reduce_named_params, came "
                "after that of param_to_hook_all_reduce had started their reduction, so it would "
                "be lost; choose a parameter whose gradient is computed later, that is, one used "
                "earlier in forward"
            )

    def _start(self, _trigger: torch.Tensor) -> None:
        if self._task is None:
            if not self._expected:
                return
            self._arm()
        if self._packed:
            return
        self._begun = self._averages = True
        self._pack()
        if self._reducer is None or self._reducer.all_begun:
            self._begin()

    def _pack(self) -> None:
        with torch.no_grad():
            for bucket in self._buckets:
                used = map(self._usage.used, bucket.members)
                bucket.unused = [place for place, here in enumerate(used) if not here]
                bucket.pack()
        self._packed = True

    def _begin(self) -> None:
        """Begin the reductions, once the gradients are there and the reducer's have begun."""
        if not self._packed or self._in_flight:
            return
        comm = self._group.carrier
        before = getattr(comm, "seq", 0)
        api, number = API, self._passes
        if self._given_up:
            api = API_GIVEN_UP
            number = GIVEN_UP | zlib.crc32(f"{self._passes} {self._given_up}".encode())
        with torch.no_grad():
            for bucket in self._buckets:
                self._works.append(
                    comm.all_reduce(bucket.buffer, ReduceOp.AVG, True, api=api, extra=number)
                )
            self._usage.share(comm, number)
        self._whole = True
        self._leave_out_since(before)

    def _leave_out_since(self, before: int) -> None:
        """Let the reducer not take these calls for those of its buckets."""
        if self._reducer is not None:
            calls = getattr(self._group.carrier, "seq", 0) - before
            self._reducer.transfer.leave_out(calls)

    def _wait(self) -> None:
        """Wait for what is in flight, and leave the averages where they are."""
        for work in self._works:
            work.wait()
        self._usage.wait()

    # -- the end of a pass ---------------------------------------------------------------------

    def _complete(self) -> None:
        """Begin the reductions at the end of a pass, with what is there, unless they have begun.

        The trigger got no gradient on this rank, but may have got one on others.
        """
        if self._in_flight:
            return
        if self._task is None:
            self._arm()  # no output has announced the pass
        if not self._packed:
            self._pack()
        self._begin()

    def end_of_backward(self) -> None:
        """Wait for the averages."""
        if self._reducer is not None and not self._deferred:
            self._deferred = True  # until the reducer's end, which completes what is not begun
            watch(self)
            return
        if self._begun or self._accumulates:  # the reducer has no part in this backward
            self._complete()
        self._task, self._begun, self._deferred = None, False, False
        if self._in_flight:
            self._expected = False
            self._finish(take=True)

    def cut_off(self, task: int) -> None:
        """Signal peers that an exception has ended backward; the next forward waits for the rest.

        Parameters
        ----------
        task : int
            Autograd's number of the backward.
        """
        if self._task == task and self._averages:
            self._wind_up()

    def _wind_up(self) -> None:
        """Begin the calls in which peers may wait, as :class:`~.reducer.failure.Failure` does."""
        self._task, self._begun, self._expected = None, False, False
        self._packed = self._deferred = False
        if not self._in_flight:
            before = getattr(self._group.carrier, "seq", 0)
            buffers = [bucket.buffer for bucket in self._buckets]
            for buffer in (*buffers, buffers[-1]):
                comm = serving(self._group.carrier, buffer)
                if comm.check > 0:  # unchecked, a barrier would corrupt the peers' sums
                    with suppress(DistError):  # the peers' too, and this rank has its own
                        self._works.append(comm.barrier(async_op=True, api=API_ABANDON))
            self._leave_out_since(before)
        self._left_behind = self._in_flight

    def _finish(self, take: bool = False) -> None:
        # Also after a handler's exception: what is in flight uses the buckets.
        self._left_behind = True
        try:
            self._wait()
            if take:
                with torch.no_grad():
                    for bucket in self._buckets:
                        keep = self._usage.unused_anywhere(bucket.members, bucket.unused)
                        bucket.take(None, keep, None)
        except DistError as error:
            if not error.in_step:
                self._failed = error
            if take and self._reducer is not None and self._reducer.held:
                # backward raises, so nobody calls `finalize_backward` for the other gradients
                with suppress(DistError):
                    self._reducer.finalize()
            self._reset()
            raise
        # Ranks that have those averages find in the next pass that this one has not.
        self._given_up = 0 if take else self._given_up + self._whole
        self._reset()

    def _reset(self) -> None:
        self._passes += self._in_flight
        self._packed = self._deferred = self._whole = False
        self._left_behind = False
        self._works = []
        self._usage.reset()
        for bucket in self._buckets:
            bucket.reset()
