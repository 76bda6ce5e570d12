"""Settings and statistics of a DistributedDataParallel after its construction."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hpcdist.errors import DistError
from hpcdist.groups.numbers import yes_or_no
from hpcdist.parallel.comm_hooks._arguments import check_in_buckets
from hpcdist.parallel.comm_hooks.builtin import BuiltinCommHookType, builtin
from hpcdist.parallel.comm_hooks.optimizer import OptimizerInBackward
from hpcdist.parallel.ddp.buffers import BufferCommHookLocation
from hpcdist.parallel.ddp.logger import Logger
from hpcdist.parallel.reducer.grad_bucket import GradBucket

if TYPE_CHECKING:
    from hpcdist.parallel.ddp.buffers import Buffers
    from hpcdist.parallel.reducer.reducer import Reducer
    from hpcdist.parallel.reducer.stats import Stats


class Settings:
    """The part of DistributedDataParallel for hooks, settings and statistics."""

    forward_sync_buffers: bool
    static_graph: bool
    reducer: Reducer | None
    _buffers_of_module: Buffers
    _stats: Stats

    def register_comm_hook(
        self, state: Any, hook: Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]
    ) -> None:
        """Register a hook that communicates the gradients, in place of the average.

        All ranks must register the same hook, before the first backward pass; it can be done once.

        Parameters
        ----------
        state : object
            Passed to the hook as it is: error feedback, groups, counters, or None.
        hook : callable
            ``hook(state, bucket) -> torch.futures.Future`` of a tensor. Called during backward for
            each bucket in the order of its index, as soon as its gradients are computed. They are
            not divided by the number of ranks. The tensor in the future, of as many elements as
            ``bucket.buffer()``, becomes the bucket's gradients.

        Raises
        ------
        TypeError
            If `hook` cannot be called.
        ValueError
            If `state` is to step parameters that are delayed or ignored, which no bucket has.
        RuntimeError
            If a hook is registered already, during backward, or before :meth:`finalize_backward`.

        Notes
        -----
        Source: ``torch.nn.parallel.DistributedDataParallel.register_comm_hook``.

        Examples
        --------
        >>> def mean_of_halves(group, bucket):
        ...     half = bucket.buffer().to(torch.bfloat16)
        ...     work = dist.all_reduce(half, dist.ReduceOp.AVG, group, async_op=True)
        ...     return work.get_future().then(lambda f: f.value()[0].to(bucket.buffer().dtype))
        >>> model.register_comm_hook(None, mean_of_halves)
        """
        if not callable(hook):
            raise self._logged(
                TypeError(f"Communication hook must be callable, not {type(hook).__name__}")
            )
        reducer = self._the_reducer("register_comm_hook")
        if reducer.transfer.has_hook:
            raise self._logged(RuntimeError("register_comm_hook can only be called once"))
        if isinstance(state, OptimizerInBackward):
            check_in_buckets(self, state.optimizers)
        reducer.set_hook(state, hook)
        self._stats.describe(comm_hook=getattr(hook, "__qualname__", type(hook).__name__))

    def _register_builtin_comm_hook(self, comm_hook_type: BuiltinCommHookType) -> None:
        """Register one of torch's two built-in hooks; see :meth:`register_comm_hook`."""
        self.register_comm_hook(None, builtin(comm_hook_type))
        self._stats.describe(comm_hook=f"BuiltinCommHookType.{comm_hook_type.name}")

    def _register_buffer_comm_hook(
        self,
        state: Any,
        hook: Callable[[Any, dict[str, torch.Tensor]], Any],
        comm_hook_location: Any = BufferCommHookLocation.POST_FORWARD,
    ) -> None:
        """Let ``hook(state, named_buffers)`` synchronize buffers, in place of rank 0's copy.

        It may return a list of futures, which are waited for at the end of backward.
        """
        if not callable(hook):
            raise self._logged(TypeError(f"hook must be callable, not {type(hook).__name__}"))
        self._buffers_of_module.set_hook(state, hook, comm_hook_location)

    def _logged(self, error: Exception) -> Exception:
        """Record an error as the ``error`` of the logging data, and return it."""
        self._stats.failed(error)
        return error

    def _the_reducer(self, what: str) -> Reducer:
        if self.reducer is None:
            raise RuntimeError(f"{what}: the all-reduce of all parameters is delayed")
        return self.reducer

    # -- settings after construction -----------------------------------------------------------

    @property
    def broadcast_buffers(self) -> bool:
        """The older name of ``forward_sync_buffers``."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = yes_or_no(value, "broadcast_buffers")

    def _set_static_graph(self) -> None:
        """Treat the graph as static from now on; before the first backward, on all ranks."""
        if self.static_graph:
            warnings.warn(
                "You've set static_graph to be True, no need to set it again.", stacklevel=2
            )
            return
        if self._stats.begun:
            error = DistError(
                "DistributedDataParallel: _set_static_graph() should be called before training loop"
                " starts; or pass static_graph=True to the constructor"
            )
            self._stats.failed(error)
            raise error
        self._the_reducer("_set_static_graph").set_static()
        self.static_graph = True
        self._stats.describe(static_graph=True)

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: torch.nn.Module, params_and_buffers_to_ignore: Sequence[str]
    ) -> None:
        """Ignore these full names when `module` is wrapped: no copies and no averages."""
        module._ddp_params_and_buffers_to_ignore = list(  # type: ignore[assignment]
            params_and_buffers_to_ignore
        )

    # -- the end of backward, by hand ------------------------------------------------------------

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Whether the caller ends each averaging backward pass with :meth:`finalize_backward`.

        Off by default. All ranks must set it, between a finished pass and the next forward. The
        averages then travel on while the caller does something else after ``backward()``, and
        ``parameter.grad`` has them after :meth:`finalize_backward` only.

        Notes
        -----
        Source: the property of this name of ``torch.nn.parallel.DistributedDataParallel`` (2.15).
        """
        return self.reducer is not None and self.reducer.manual

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        name = "require_manual_backward_finalization"
        self._the_reducer(name).set_manual(yes_or_no(required, name))

    @property
    def should_finalize_after_backward(self) -> bool:
        """Whether ``backward()`` must have returned before :meth:`finalize_backward`.

        The same as :attr:`require_manual_backward_finalization`: hpcdist's buckets are complete at
        the end of backward, so a hook in backward is too early for it.
        """
        return self.require_manual_backward_finalization

    def finalize_backward(self) -> None:
        """Wait for the averages of the last backward pass, and write them to ``parameter.grad``.

        All ranks must call it once after each ``backward()`` outside :meth:`no_sync`.

        Raises
        ------
        RuntimeError
            If :attr:`require_manual_backward_finalization` is off, or no pass waits for it.
        DistError
            If the averages could not be computed.
        """
        self._the_reducer("finalize_backward").finalize()

    # -- figures -------------------------------------------------------------------------------

    @property
    def communication_seconds(self) -> float:
        """Seconds this rank waited for gradients at the end of backward, since construction.

        What backward did not hide; reading it is local.
        """
        return self._stats.wait_seconds

    @property
    def logger(self) -> Logger:
        """The figures as an object."""
        return Logger(self._the_reducer("logger"))

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Figures under the names of torch's DDP logging data; times in nanoseconds. Local."""
        return self._stats.data()

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Take times in the first ten iterations, and then in every `sample_rate`-th."""
        if sample_rate < 1:
            raise ValueError(
                "DDP runtime logging sample rate should be equal or greater than 1, not "
                f"{sample_rate}"
            )
        self._stats.rate = sample_rate
