"""Averages gradients between ranks while backward still runs.

Every parameter carries a hook that autograd calls once its gradient has been accumulated. The
reducer counts the gradients of a pass, and passes each complete one to the pipeline, which packs
full buckets and starts their all-reduces. When backward is over, a callback of the autograd engine
waits for the all-reduces and copies the averages back.

How the reducer knows that a backward pass concerns it: ``expect`` is called by forward, and it puts
a hook on each output tensor. The output's hook runs before any parameter's and in the outermost
backward pass (a nested one, from re-entrant checkpointing, has an end of its own, which would be
too early). Gradients that arrive unannounced (``no_sync``, or the bare module used on its own)
stay local.

Parameters that get no gradient are an error, unless the reducer looks for them (in the graph behind
forward's outputs, and at the end of backward for those that the graph leads to in vain), or the
graph is static: then the first backward pass counts, and its buckets start at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from hpcdist._graph import GradientHook, run_last
from hpcdist.errors import DistError
from hpcdist.groups.process_group import ProcessGroup
from hpcdist.parallel.reducer import graph, texts
from hpcdist.parallel.reducer.bucket import Allocator, allocate
from hpcdist.parallel.reducer.cut_off import CutOff
from hpcdist.parallel.reducer.failure import current_backward, name_nans, watch
from hpcdist.parallel.reducer.pipeline import Pipeline
from hpcdist.parallel.reducer.schedule import Schedule
from hpcdist.parallel.reducer.stats import Stats
from hpcdist.parallel.reducer.transfer import Transfer
from hpcdist.parallel.reducer.unused import Usage


class Reducer:
    """Gradient averaging for a fixed list of parameters.

    Parameters
    ----------
    named_parameters : sequence of (str, torch.nn.Parameter)
        Those that require gradients, in registration order, the same on every rank.
    group : ProcessGroup
        The ranks between which gradients are averaged.
    caps : sequence of int
        Bucket sizes in bytes, see :func:`~hpcdist.parallel.reducer.bucket.assign_buckets`.
    as_view : bool
        Let gradients be views of the buckets.
    find_unused : bool
        Find parameters without a gradient, and treat them as zeros.
    skip_unused : bool
        Leave out buckets whose parameters are all unused; the same ones on all ranks.
    sparse : collection of int
        Indices of the parameters with sparse gradients.
    dtype : torch.dtype, optional
        Type in which gradients are reduced, instead of the parameters' dtype.
    tail : int, optional
        See :func:`~hpcdist.parallel.reducer.bucket.assign_buckets`.
    piece : int, optional
        Reduce buckets in pieces, see :class:`~hpcdist.parallel.reducer.schedule.Schedule`, until a
        hook wants them whole.
    allocator : callable
        Allocates the buckets' memory, see :func:`hpcdist.parallel.reducer.bucket.allocate`.
    stats : Stats, optional
        Where to keep figures.
    has_hooks : callable, optional
        Whether hooks of the program on modules may change gradients in this backward.

    Attributes
    ----------
    after_backward : list of torch.futures.Future
        Waited for at the end of the next backward pass; buffer hooks put theirs here.
    before_backward : callable or None
        Called at the start of each backward pass.
    transfer : Transfer
        What moves the buckets.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, torch.nn.Parameter]],
        group: ProcessGroup,
        caps: Sequence[int],
        *,
        as_view: bool = False,
        find_unused: bool = False,
        skip_unused: bool = False,
        sparse: Collection[int] = (),
        dtype: torch.dtype | None = None,
        tail: int | None = None,
        piece: int | None = None,
        allocator: Allocator = allocate,
        stats: Stats | None = None,
        has_hooks: Callable[[], bool] | None = None,
    ) -> None:
        self._has_hooks = has_hooks or (lambda: False)
        self._names = [name for name, _ in named_parameters]
        self._parameters = [p for _, p in named_parameters]
        self._own = set(map(id, self._parameters))
        self._leaves: list[Any] = []  # hooks on other leaves that forward has returned
        self._find_unused, self._skips = find_unused, skip_unused
        self.stats = stats or Stats()
        self.after_backward: list[Any] = []
        self.before_backward: Callable[[], None] | None = None
        self.transfer = Transfer(group, skip_unused)
        self._usage = Usage(self._parameters, skip_unused)
        self._schedule = Schedule(
            self._parameters, caps, sparse, as_view, allocator, dtype, tail, piece
        )
        self._pipeline = Pipeline(
            self._parameters, self._schedule, self.transfer, self._usage, self.stats
        )
        self._pipeline.tracks = find_unused
        self._ready = self._pipeline.ready

        total = len(self._parameters)
        self._expected = False  # a forward has announced a backward
        self._local_task = -1  # autograd's, of the last one that did not average
        self._creates_graph = False
        self._running = False  # the first gradient of the pass is ready
        self._static: list[int] | None = None  # gradients of each parameter, once counted
        self._recording = False  # this pass counts them
        self._template = [1] * total  # how many gradients each parameter gets per pass
        self._left = self._template[:]  # and how many are still missing
        self._pass = CutOff(self._pipeline, self.transfer, self.stats)
        self._recalled: bytes | None = None  # for the next forward
        # The order in which gradients become ready, in the first pass; then it waits to be taken
        # over by the next forward.
        self._order: list[int] | None = [] if not find_unused else None
        self._first_order: list[int] | None = None
        self._may_rebuild = not find_unused
        self._rebuild = False
        self._adopted: list[int] | None = None  # rank 0's order, once taken over
        self._generation = group.members.generation

        self._at_end: Callable[[], None] | None = None
        self._wait_for_more: Callable[[], None] | None = None
        self.manual = False  # the caller ends a pass with `finalize`
        self._held = False  # a pass waits for that
        self._accumulates = False  # this pass adds to leaves behind forward's outputs
        on_gradient = self._on_gradient  # one object for all parameters
        # Keep only the numbers of torch's handles: a handle can take more memory than a gradient.
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(GradientHook(on_gradient, index)).id
            for index, parameter in enumerate(self._parameters)
        ]
        self._all_hooks: list[Any] = [p._post_accumulate_grad_hooks for p in self._parameters]

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Those whose gradients it averages."""
        return self._parameters

    @property
    def buckets(self) -> list[Any]:
        """Buckets, or pieces of them, in the order in which they are reduced."""
        return self._pipeline.buckets

    @property
    def all_begun(self) -> bool:
        """Whether no more buckets of this pass will begin before the end of backward."""
        return self._pipeline.full

    @property
    def held(self) -> bool:
        """Whether a pass waits for :meth:`finalize`."""
        return self._held

    def call_after_buckets(
        self,
        call: Callable[[], None] | None,
        at_end: Callable[[], None] | None,
        wait: Callable[[], None] | None,
    ) -> None:
        """Call a function in each pass as soon as :attr:`all_begun`, and another at its end.

        Both may begin more, before this rank waits for the averages. `wait` waits for that, before
        the ranks compare how they end a pass with a hook.
        """
        self._pipeline.after_last, self._at_end, self._wait_for_more = call, at_end, wait

    def detach(self) -> None:
        """Remove the hooks; those of the parameters keep the reducer alive until then."""
        for parameter, number in zip(self._parameters, self._hooks, strict=False):
            (parameter._post_accumulate_grad_hooks or {}).pop(number, None)  # as a handle does
        self._hooks, self._all_hooks = [], []
        self._expected = False
        self._let_go_of_leaves()
        self.before_backward = None  # may refer to this object
        self._has_hooks = lambda: False

    # -- settings -----------------------------------------------------------------------------

    @property
    def recording(self) -> bool:
        """Whether the graph is static and has not been seen yet."""
        return self._recording

    def set_static(self) -> None:
        """Treat the graph as static: the next pass counts gradients, later ones expect as many."""
        self._recording = True
        self._template = [0] * len(self._parameters)
        self._find_unused = False
        self._pipeline.tracks = True
        self._order = []
        self._may_rebuild = True

    def may_skip(self, allowed: bool) -> None:
        """Let buckets that no rank uses be left out, if `skip_unused` is set, or not."""
        skips = self._skips and allowed
        self.transfer.skips, self._usage.shared = skips, not skips

    def set_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        """Let a user's hook communicate the buckets, which are then not divided into pieces."""
        if self._running:
            raise RuntimeError("register_comm_hook cannot be called during backward")
        if self._held:
            raise RuntimeError(texts.held("register_comm_hook"))
        self.transfer.set_hook(state, hook)
        self._pipeline.join()

    def set_manual(self, manual: bool) -> None:
        """Let the caller end each pass with :meth:`finalize`, or the end of backward itself."""
        if self._running or self._held:
            raise RuntimeError(texts.held("require_manual_backward_finalization is set"))
        self.manual = manual

    # -- called by forward --------------------------------------------------------------------

    def check(self) -> None:
        """Refuse to start another forward after a failed backward.

        It finishes a backward pass that an exception ended, so every rank must call forward. Peers
        that still wait for this rank's gradients raise an error.

        Raises
        ------
        DistError
            If reducing gradients failed earlier, on this rank or on a peer.
        RuntimeError
            If a pass waits for :meth:`finalize`.
        """
        if self._held:
            raise RuntimeError(texts.held("the next forward"))
        if self._pass.left_behind:
            if self._pass.averages:
                self._abandon()
            else:
                self._pass.task = None  # torch.autograd.grad raised, in which no rank averages
        self._pass.check(self.transfer.group.members.generation != self._generation)
        if self._recalled is not None:  # after the failed pass has gone
            self._usage.recall(self._recalled)
            self._recalled = None

    def noted(self) -> bytes:
        """Return which parameters have gradients that are not averaged, as under ``no_sync``."""
        return self._usage.noted()

    def recall(self, noted: bytes) -> None:
        """Let the next forward go on from what :meth:`noted` said then."""
        self._recalled = noted

    def rebuild(self) -> bool:
        """Adopt the order of rank 0's first backward pass; collective if that is over.

        Returns
        -------
        bool
            Whether this was the time.
        """
        if self.transfer.group.members.generation != self._generation:
            self._follow()
            return True
        if not self._rebuild:
            return False
        self._rebuild = self._may_rebuild = False
        order = self._schedule.agree(self.transfer.comm, self._first_order)
        self._adopted = order
        self._order = self._first_order = None
        self._pipeline.reorder(order)
        self.stats.rebuilt(self.buckets, order)
        return True

    def _follow(self) -> None:
        """Go on in a group that was reconfigured: some ranks may have rebuilt, others not."""
        order = self._schedule.agree(self.transfer.comm, self._adopted)
        self._generation = self.transfer.group.members.generation
        self._rebuild = self._may_rebuild = False
        self._adopted, self._order, self._first_order = order, None, None
        if self._recording or self._static is not None:
            self._static = None  # a death in the first step: some ranks have seen the graph
            self._usage.forget()
            self.set_static()
        self._pipeline.reorder(order)
        self.transfer.follow()
        self.stats.rebuilt(self.buckets, order)

    def expect(self, output: Any) -> None:
        """Announce that the backward of `output` averages gradients."""
        self._expected = True
        tensors = [t for t in graph.find_tensors(output) if t.requires_grad]
        if not tensors:
            run_last(self._all_hooks, self._hooks)  # no output announces the pass
        searches = self._pipeline.tracks or (self._static is not None and not any(self._static))
        if searches:
            self._usage.search(tensors, mark=self._find_unused)
        self._let_go_of_leaves()
        # A loss without any parameter may be a leaf; beside other outputs a leaf is an input.
        leaves = searches and all(tensor.grad_fn is None for tensor in tensors)
        for tensor in tensors:
            if tensor.grad_fn is not None:
                tensor.register_hook(self._arm)
            elif leaves and id(tensor) not in self._own:
                hook = tensor.register_post_accumulate_grad_hook(self._arm_by_leaf)
                self._leaves.append(hook)

    def keep_local(self) -> None:
        """Announce that the next backward does not average gradients."""
        self._expected = False
        self._let_go_of_leaves()

    def _let_go_of_leaves(self) -> None:
        """Remove the hooks on what an earlier forward has returned: a leaf keeps them for ever."""
        while self._leaves:
            self._leaves.pop().remove()

    # -- called by autograd --------------------------------------------------------------------

    def _arm(self, _gradient: Any = None) -> None:
        """Record the current backward pass, and register the callback for its end."""
        if self._held:
            raise RuntimeError(texts.held("the next backward"))
        task = current_backward()
        if self._pass.precedes(task):
            self._abandon()
            self._pass.refuse()
        # No gradient seen yet: nothing is lost by replacing a failed pass by this one.
        if self._pass.task is None or (not self._running and self._pass.task != task):
            if self.before_backward is not None:
                self.before_backward()
            watched = run_last(self._all_hooks, self._hooks)
            if self._pipeline.singles:
                # Whoever ends a pass by hand may change gradients before that.
                watched = watched or self.manual or self._has_hooks()
                self._pipeline.begin()
            self.transfer.watched = watched
            self._pass.task = task
            self._creates_graph = torch.is_grad_enabled()
            self._accumulates = self._usage.will_accumulate()
            self._pass.begin(self._accumulates or graph.may_accumulate(self._parameters))
            watch(self)

    def _arm_by_leaf(self, _leaf: torch.Tensor) -> None:
        """Arm the pass: backward has added to the gradient of a leaf that forward has returned."""
        if self._pass.task is None and self._expected:
            self._arm()
            self._accumulates = self._pass.averages = True

    def _on_gradient(self, index: int, parameter: torch.Tensor) -> None:
        """Count one gradient, and pass it to the pipeline when it is complete."""
        if not self._running and not self._begin(index, parameter):
            return
        left = self._left[index] - 1
        if self._pipeline.tracks and parameter.grad is not None:
            self._usage.note(index)
        if left:
            self._not_ready(index, left)
            return
        if self._order is not None:
            self._order.append(index)
        if parameter.grad is None and self._pipeline.tracks:
            self._leave_out([index])  # its gradient is undefined: treat it as missing
            return
        self._left[index] = 0
        self._ready(index, parameter)

    def _begin(self, index: int, parameter: torch.Tensor) -> bool:
        """Decide at the first gradient whether a pass averages."""
        if self._held:
            raise RuntimeError(texts.held("the next backward"))
        if self._pass.task is None:
            if not self._expected:
                self._begin_local()
                if self._pipeline.tracks and parameter.grad is not None:
                    self._usage.note(index)  # under no_sync: the next pass averages it
                return False
            self._arm()
        if self._creates_graph:
            raise self._error(texts.create_graph())
        self._begin_pass()
        return True

    def _begin_local(self) -> None:
        """Prepare at the first gradient of a pass that does not average, before anything steps.

        This hook of a parameter runs before those of its gradient's node, where torch attaches
        optimizers.
        """
        task = current_backward()
        if task != self._local_task:
            self._local_task = task
            if self.before_backward is not None:
                self.before_backward()

    def _begin_pass(self) -> None:
        self._running = self._pass.averages = True
        self.transfer.begin()
        self._left = self._template[:]
        self._usage.begin()
        self.stats.backward_begins()
        if self._recording:
            return
        if self._static is not None:
            unused = [i for i, count in enumerate(self._static) if not count]
        else:
            unused = sorted(self._usage.unreached)
        if unused:
            self._leave_out(unused)

    def _not_ready(self, index: int, left: int) -> None:
        """Handle a gradient that is not the last expected one of its parameter."""
        if self._recording:
            self._left[index] = left  # counts down from 0
            if self._order is not None:
                self._order.append(index)
        elif left > 0:
            self._left[index] = left
        elif self._static is not None:
            before = self._static[index]
            raise self._error(texts.changed(self._names[index], before, "more"))
        elif index in self._usage.unreached:
            raise self._error(texts.outside(self._names[index]))
        else:
            raise self._error(texts.twice(self._names[index]))

    def _leave_out(self, indices: Sequence[int]) -> None:
        """Count parameters that get no gradient in this pass on this rank as ready."""
        for index in indices:
            self._left[index] = 0
        self._pipeline.leave_out(indices)

    # -- the end of a pass ---------------------------------------------------------------------

    def end_of_backward(self) -> None:
        """Wait for the averages and distribute them; runs once, after the last gradient."""
        if not self._running:
            # torch.autograd.grad accumulates nothing. A backward that reaches none of the
            # parameters differs: other ranks' backward may reach some, and wait for this rank.
            if not self._accumulates:
                self._pass.over()
                return
            self._begin_pass()
        self.stats.computed()
        if self._recording:
            self._end_recording()
        if not self._pipeline.full:
            missing = [i for i, left in enumerate(self._left) if left]
            if self._find_unused:
                self._leave_out(missing)
            else:
                self._abandon()
                raise self._error(self._unfinished(missing))
        if self._at_end is not None:
            self._at_end()
        if self.manual:
            self._held, self._running, self._expected, self._pass.task = True, False, False, None
        else:
            self._finish()

    def finalize(self) -> None:
        """End a pass whose end was left to the caller."""
        if not self.manual:
            raise RuntimeError("finalize_backward: require_manual_backward_finalization is off")
        if not self._held:
            raise RuntimeError(
                "finalize_backward: no backward pass waits for it; call it once after each "
                "backward() outside no_sync()"
            )
        self._held = False
        self._finish()

    def _end_recording(self) -> None:
        """Adopt the counts for the static graph, and start all buckets."""
        self._recording = False
        self._template = [-count for count in self._left]
        assert self._order is not None
        last = dict.fromkeys(reversed(self._order))  # a parameter is ready with its last gradient
        self._order = list(reversed(last))
        unused = [i for i, count in enumerate(self._template) if not count]
        self._order += unused
        self._left = [0] * len(self._left)
        self._static = self._template
        self._pipeline.fill(unused)

    def _finish(self) -> None:
        try:
            with torch.no_grad():
                unused = self._pipeline.finish()
                for future in self.after_backward:
                    future.wait()
                if self.transfer.has_hook:
                    self._usage.wait()  # all ranks are in it, or none comes to the end
                    if self._wait_for_more is not None:
                        self._wait_for_more()
                    self.transfer.agree(self.buckets)
                self.transfer.call_after_pass()
        except BaseException as error:
            self._pass.failure.of_finish(error, self.buckets, self._pipeline.follows)
            name_nans(error, self._names, self._parameters)
            raise
        else:
            self.transfer.end()
            size = sum(self._parameters[i].numel() * self._parameters[i].itemsize for i in unused)
            self.stats.finished(self.buckets, frozenset(unused), size)
            self._rebuild = self._may_rebuild
            if self._order is not None:
                self._first_order, self._order = self._order, None
        finally:
            self._reset()

    def shadow(self) -> None:
        """Take part in the others' backward pass on a rank that is done: with zeros.

        All ranks that have run out of data must call it once per backward pass of the others. The
        averages become this rank's gradients too, for an optimizer that shadows the others' steps,
        until :meth:`restore`.
        """
        counted = self._pipeline.tracks or self._static is not None
        self.transfer.begin()
        try:
            with torch.no_grad():
                self._pipeline.shadow(counted)
                self.transfer.agree(self.buckets)
                self.transfer.call_after_pass()
        except BaseException as error:
            self._pass.failure.of_finish(error, self.buckets, self._pipeline.follows)
            raise
        self.transfer.end()
        self._rebuild = self._may_rebuild
        self._reset()

    def gradients(self) -> list[torch.Tensor | None]:
        """Return copies of this rank's gradients, and None for missing ones."""
        return [None if p.grad is None else p.grad.clone() for p in self._parameters]

    def restore(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Restore gradients; those that are views of buckets stay views."""
        with torch.no_grad():
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                if gradient is None or parameter.grad is None or gradient.is_sparse:
                    parameter.grad = gradient
                else:
                    parameter.grad.copy_(gradient)

    # -- when something went wrong -------------------------------------------------------------

    def cut_off(self, task: int | None) -> None:
        """Signal peers that an exception ended backward, if `task` is the current pass.

        Parameters
        ----------
        task : int
            Autograd's number of the backward.
        """
        self._pass.signal(task, self._running)

    def _abandon(self) -> None:
        """Finish a backward pass that will never fill the remaining buckets."""
        waits = [self._usage.wait]
        if self._wait_for_more is not None and self.transfer.has_hook:
            waits.append(self._wait_for_more)
        self._pass.abandon(self._running, waits)
        self._reset()

    def _reset(self) -> None:
        """Prepare for the next pass."""
        self._expected = self._running = False
        self._pass.over()
        self._usage.reset(keep=self._static is not None)
        self._pipeline.tracks = self._pipeline.tracks and self._static is None
        self.after_backward = []
        if self._order is not None:
            self._order = []
        self._pipeline.reset()

    def _error(self, text: str) -> DistError:
        """Return an error of this rank, recorded in the logging data."""
        error = DistError(text)
        self.stats.failed(error)
        return error

    def _unfinished(self, missing: list[int]) -> str:
        if self._static is not None:
            index = missing[0]
            count = self._static[index]
            return texts.changed(self._names[index], count, str(count - self._left[index]))
        names = [
            self._names[i]
            + ("" if self._parameters[i].requires_grad else " (its requires_grad is now False)")
            for i in missing
        ]
        return texts.unused(self._me(), names, len(self._names))

    def _me(self) -> int:
        return self.transfer.group.members.ranks[self.transfer.comm.rank]
