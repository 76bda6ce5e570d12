"""DistributedDataParallel: a module that averages its gradients between ranks."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import reduce
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from hpcdist.backends.dispatch import agreeing
from hpcdist.backends.refusal import refusing_parts
from hpcdist.groups import comparison, joining
from hpcdist.groups import state as _group
from hpcdist.groups.numbers import yes_or_no
from hpcdist.groups.process_group import ProcessGroup
from hpcdist.groups.resolve import member
from hpcdist.parallel.ddp import arguments
from hpcdist.parallel.ddp.attached import Attached
from hpcdist.parallel.ddp.buffers import Buffers
from hpcdist.parallel.ddp.delayed import DelayedReduction
from hpcdist.parallel.ddp.precision import Precision
from hpcdist.parallel.ddp.settings import Settings
from hpcdist.parallel.ddp.shadow import Uneven
from hpcdist.parallel.describe import describe
from hpcdist.parallel.reducer import graph
from hpcdist.parallel.reducer.bucket import API
from hpcdist.parallel.reducer.reducer import Reducer
from hpcdist.parallel.reducer.schedule import piece_size
from hpcdist.parallel.reducer.stats import Stats
from hpcdist.parallel.sync import packed, send
from hpcdist.parallel.sync_batchnorm import TorchLayers

_SAME_MODEL = (
    "DDP expects same model",
    "Build the module in the same way, and pass the same arguments, on every rank",
)


class DistributedDataParallel(torch.nn.Module, Settings, Uneven):
    """Train one replica of a module per rank on different data, with the same parameters.

    Construction compares the module between ranks and copies rank 0's parameters and buffers to
    the others. After every backward pass ``parameter.grad`` is the average of all ranks' gradients,
    bitwise the same on all ranks, so that equal optimizers take equal steps. Gradients are reduced
    in buckets, each of which starts as soon as it is full (on CPUs large ones in pieces, as soon as
    those are full), while backward computes the rest.

    All ranks of the group must construct it, and must run forward and backward together (not
    under :meth:`no_sync`).

    Parameters
    ----------
    module : torch.nn.Module
        The module to train, in its final form: parameters added, replaced or unfrozen after
        this are not averaged. It stays usable on its own as ``.module``.
    device_ids : list of one int or torch.device, optional
        The GPU that the module is on. Inputs are then moved there before forward.
    output_device : int or torch.device, optional
        The same GPU: outputs stay where the module makes them.
    dim : int
        Must be 0. (It has a meaning only with several devices per process.)
    broadcast_buffers : bool, optional
        The older form of `forward_sync_buffers`; False also leaves buffers out at construction,
        where their shapes may then differ between ranks.
    init_sync : bool
        False: skip the comparison and the copy at construction. The caller must then ensure that
        the modules are equal.
    process_group : ProcessGroup, optional
        The ranks that train together. Default: the default group.
    bucket_cap_mb : float, optional
        Size of a bucket, MiB. Default: 1 for the first bucket of each dtype and 25 for the rest,
        of which the last ones become smaller, down to 1, so that little is left to do when backward
        ends. If given, it applies to all. With 0 each parameter has its own bucket.
    find_unused_parameters : bool
        Allow parameters that take no part in a loss; they may differ per rank and per iteration.
        They count as zeros where they are unused, and keep their ``grad`` if no rank used them.
        This costs a walk through the autograd graph in each forward.
    check_reduction : bool
        Ignored; kept because torch's signature has it.
    gradient_as_bucket_view : bool
        Let gradients be views of the buckets: saves one copy of all gradients in memory and one or
        two in time. ``parameter.grad.detach_()`` is then not allowed.
    static_graph : bool
        Promise that each iteration uses the same parameters in the same way. Then unused parameters
        need no search, and a parameter may get several gradients in one backward (re-entrant
        checkpoints). The first iteration's buckets start at its end.
    delay_all_reduce_named_params : list of (str, torch.nn.Parameter), optional
        Parameters to average together when the gradient of `param_to_hook_all_reduce` is computed,
        and all buckets of the others have begun; at the end of a backward in which it is not.
    param_to_hook_all_reduce : torch.nn.Parameter, optional
        Given together with `delay_all_reduce_named_params`, and may be one of them.
    mixed_precision : MixedPrecision, optional
        Compute and communicate in lower precision, see :class:`~hpcdist.parallel.MixedPrecision`.
    device_mesh : DeviceMesh, optional
        Of one dimension, in place of `process_group`.
    skip_all_reduce_unused_params : bool
        With `find_unused_parameters`: skip buckets of which no parameter is used, except under
        :meth:`join`. The unused parameters must then be the same on all ranks; else backward
        raises :class:`~hpcdist.DistMismatchError` on all of them, with a communication hook at
        its end.
    bucket_cap_mb_list : list of float, optional
        A size for each bucket in place of `bucket_cap_mb`; the last one applies to all that follow.
    batched_grad_copy : bool
        Ignored: gradients are copied into buckets many at a time in any case.
    forward_sync_buffers : bool, optional
        Copy rank 0's buffers (running means and the like) to all ranks at the start of each
        forward that follows a forward which averages gradients. Default: True.
    lazy_bucket_allocation : bool
        Ignored: buckets keep their memory from construction on, where MPI has it registered.

    Raises
    ------
    DistMismatchError
        On all ranks, if the ranks' modules or arguments differ; names the rank and the parameter.
        On the others, if one rank raises because of its arguments.
    ValueError
        If an argument is out of range or not available, if this process is not in the group, or
        if no parameter requires a gradient.
    TypeError
        If `module` is not a ``torch.nn.Module``, or a flag is not a boolean.
    RuntimeError
        If both a group and a mesh are given, or a mesh of several dimensions.

    Notes
    -----
    ``torch.nn.parallel.DistributedDataParallel`` is the model for names and meanings. Unlike it,
    the first iteration already overlaps, the unused-parameter error is raised at the end of the
    backward pass in which it happens, and a second backward through what an earlier forward
    returned is averaged too.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, torch.nn.Parameter]] | None = None,
        param_to_hook_all_reduce: torch.nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
    ) -> None:
        torch.nn.Module.__init__(self)
        Uneven.__init__(self)
        self.process_group = arguments.group_of(process_group, device_mesh)
        if device_mesh is not None:
            self.device_mesh = device_mesh
        # the others wait in the comparison, if there is one
        due = int(not arguments.is_false(init_sync))
        with refusing_parts(agreeing(self.process_group.carrier), API, due):
            if not isinstance(module, torch.nn.Module):
                raise TypeError(f"module must be a torch.nn.Module, not {type(module).__name__}")
            arguments.check_delayed(delay_all_reduce_named_params, param_to_hook_all_reduce)
            if yes_or_no(check_reduction, "check_reduction"):
                warnings.warn("check_reduction has no effect", FutureWarning, stacklevel=2)
            self.device_ids = device_ids
            self._inputs_to = arguments.input_device(
                module.parameters(), device_ids, output_device, dim
            )
            self._caps = arguments.bucket_caps(bucket_cap_mb, bucket_cap_mb_list)
            self._tail = arguments.MIB if bucket_cap_mb is None and not bucket_cap_mb_list else None
            init_buffers, self.forward_sync_buffers = arguments.which_buffers(
                broadcast_buffers, forward_sync_buffers
            )
            self.module = module
            self.find_unused_parameters = yes_or_no(
                find_unused_parameters, "find_unused_parameters"
            )
            self.gradient_as_bucket_view = yes_or_no(
                gradient_as_bucket_view, "gradient_as_bucket_view"
            )
            self.skip_all_reduce_unused_params = yes_or_no(
                skip_all_reduce_unused_params, "skip_all_reduce_unused_params"
            )
            self.batched_grad_copy = yes_or_no(batched_grad_copy, "batched_grad_copy")
            self.lazy_bucket_allocation = yes_or_no(
                lazy_bucket_allocation, "lazy_bucket_allocation"
            )
            self.static_graph = yes_or_no(static_graph, "static_graph")
            self.mixed_precision = mixed_precision
            self.bucket_bytes_cap = max(self._caps)
            # torch's compiler refuses a size below that of its first bucket.
            self._for_compilers: Any = SimpleNamespace(
                bucket_bytes_cap=max(self.bucket_bytes_cap, arguments.MIB)
            )
            self.require_backward_grad_sync = True
            self.require_forward_param_sync = True
            self._generation = self.process_group.members.generation
            self._delayed_parameters = list(delay_all_reduce_named_params or ())
            self._delay_trigger = param_to_hook_all_reduce
            self.parameters_to_ignore = set(
                getattr(module, "_ddp_params_and_buffers_to_ignore", ())
            )
            compares = yes_or_no(init_sync, "init_sync")
        if compares and not joining.defers(self.process_group, self):
            self._init_sync(init_buffers)
        else:
            arguments.check_tensors(self._synced(init_buffers))
        self._set_up()

    def _synced(self, buffers: bool) -> list[tuple[str, torch.Tensor]]:
        """Return the tensors that are the same on all ranks after construction."""
        named: list[tuple[str, torch.Tensor]] = list(self.module.named_parameters())
        if buffers:
            named += self.module.named_buffers()
        return [(n, t) for n, t in named if n not in self.parameters_to_ignore]

    def _init_sync(self, buffers: bool) -> None:
        """Compare the module between ranks, and copy rank 0's tensors to the others."""
        facts = {
            "bucket_cap_mb": [cap / arguments.MIB for cap in self._caps],
            "broadcast_buffers": self.forward_sync_buffers,
            "find_unused_parameters": self.find_unused_parameters,
            "static_graph": self.static_graph,
            "skip_all_reduce_unused_params": self.skip_all_reduce_unused_params,
            "mixed_precision": self.mixed_precision,
            "delay_all_reduce_named_params": [name for name, _ in self._delayed_parameters],
            "param_to_hook_all_reduce": arguments.name_of(self.module, self._delay_trigger),
        }
        parameters = self._synced(False)

        def entries() -> Iterator[list[Any]]:
            yield from comparison.arguments(facts)
            yield from describe("parameter", parameters)
            yield from describe("buffer", named[len(parameters) :])

        group, named = self.process_group, self._synced(buffers)
        compared = comparison.Comparison(group, API, *_SAME_MODEL, entries)

        def due() -> int:
            if not compared.agrees():
                return 2
            with suppress(Exception):  # of a tensor that cannot be sent, on all ranks
                return 1 + len(packed(t for _, t in named))
            return 1

        with refusing_parts(agreeing(group.carrier), API, due, waits=1):
            compared.verify()
            arguments.check_tensors(named)
            if group.size() > 1:
                send(group, packed(t for _, t in named), 0, API)

    def _looks_for_hooks(self) -> Callable[[], bool]:
        """Return what tells of hooks in backward, and does not refer to this object."""
        modules = tuple(self.module.modules())
        own = (self._backward_hooks, self._backward_pre_hooks)
        return lambda: any(own) or graph.has_hooks(modules)

    def _set_up(self) -> None:
        """Make the local state: the reducer and its hooks."""
        self._norms = TorchLayers(self._modules)
        module, group = self.module, self.process_group
        delayed = {name for name, _ in self._delayed_parameters}
        named = [(n, p) for n, p in module.named_parameters() if n not in self.parameters_to_ignore]
        trained = [(n, p) for n, p in named if p.requires_grad and n not in delayed]
        if not trained and not delayed:
            raise ValueError(
                "DistributedDataParallel is not needed when a module has no parameter that "
                "requires a gradient"
            )
        self._frozen = [(name, p) for name, p in named if not p.requires_grad]
        learn = [(n, p) for n, p in named if p.requires_grad]
        self._ends = _places(module, learn[:1] + learn[-1:])
        self._buffers_of_module = Buffers(module, group, self.parameters_to_ignore)
        self._precision = None
        dtype = None
        if self.mixed_precision is not None:
            self._precision = Precision(module, self.mixed_precision, self.parameters_to_ignore)
            dtype = self.mixed_precision.reduce_dtype or self.mixed_precision.param_dtype
        self._stats = Stats()
        self.reducer = None
        if trained:
            self.reducer = Reducer(
                trained,
                group,
                self._caps,
                as_view=self.gradient_as_bucket_view,
                find_unused=self.find_unused_parameters and not self.static_graph,
                skip_unused=self.skip_all_reduce_unused_params,
                sparse=arguments.sparse_indices(module, [p for _, p in trained]),
                dtype=dtype,
                tail=self._tail,
                piece=piece_size(group.size()),
                stats=self._stats,
                has_hooks=self._looks_for_hooks(),
            )
            if self.static_graph:
                self.reducer.set_static()
            # The hooks keep the reducer alive; once this object is gone, another one can wrap the
            # module.
            weakref.finalize(self, self.reducer.detach).atexit = False
        self._attached = Attached(
            [p for _, p in trained], self._delayed_parameters, self.reducer, group, self._stats
        )
        self._attached.take()
        if self.reducer is not None:
            self.reducer.before_backward = self._attached.take
        self._delayed = None
        if delayed:
            assert self._delay_trigger is not None
            self._delayed = DelayedReduction(
                self._delayed_parameters, self._delay_trigger, group, self.reducer
            )
            weakref.finalize(self, self._delayed.detach).atexit = False
        self._describe([p for _, p in trained])

    # -- forward -------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, and arrange for the gradients of what it returns to be averaged.

        All ranks must call it the same number of times.

        Returns
        -------
        object
            What ``module(*args, **kwargs)`` returns.

        Raises
        ------
        DistError
            If an earlier backward pass failed to average gradients.
        ValueError
            If a parameter that was frozen at construction now requires a gradient.
        """
        args, kwargs = _outside_graphs(self._before_forward)(args, kwargs)
        with self._precision.in_forward() if self._precision is not None else nullcontext():
            output = self._run(args, kwargs)
        return _outside_graphs(self._after_forward)(output)

    def _run(self, args: Any, kwargs: Any) -> Any:
        # torch.compile asks torch's class which module is running, and divides its graph where
        # that one's buckets end, so that they can start while the rest of backward computes.
        reference = torch.nn.parallel.distributed.DistributedDataParallel
        before = reference._active_ddp_module
        reference._active_ddp_module = self._for_compilers
        try:
            return self.module(*args, **kwargs)
        finally:
            reference._active_ddp_module = before

    def _averages(self) -> bool:
        return torch.is_grad_enabled() and self.require_backward_grad_sync

    def _before_forward(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        averages = self._averages()
        self._check_last_backward()
        if torch.is_grad_enabled():
            self._attached.take()
        root = 0
        if self._join_config.enable:
            root = self._join_step(averages)
        elif self.reducer is not None:
            self.reducer.transfer.divisor = None
            self.reducer.may_skip(True)
        if averages:
            self._check_parameters()
            self._norms.check()
            self._stats.forward_begins()
            if self.reducer is not None:
                self.reducer.rebuild()
        self._sync_buffers("PRE_FORWARD", root)
        if self._inputs_to is not None:
            args, kwargs = tree_map_only(
                torch.Tensor, lambda each: each.to(self._inputs_to), (args, kwargs)
            )
        if self._precision is not None:
            args, kwargs = self._precision.cast(args), self._precision.cast(kwargs)
        return args, kwargs

    def _check_last_backward(self) -> None:
        try:
            if self.reducer is not None:
                self.reducer.check()
        except Exception:
            if self._delayed is not None:  # which makes calls too, in which peers may wait
                with suppress(Exception):
                    self._delayed.check()
            raise
        if self._delayed is not None:
            self._delayed.check()

    def _after_forward(self, output: Any) -> Any:
        self._sync_buffers("POST_FORWARD")
        averages = self._averages()
        # Other ranks' buffers differ from rank 0's only after a training step.
        self.require_forward_param_sync = averages
        if self._precision is not None and torch.is_grad_enabled():
            self._precision.watch(output)
        for each in (self.reducer, self._delayed):
            if each is None:
                continue
            if averages:
                each.expect(output)
            elif torch.is_grad_enabled():
                each.keep_local()
        return output

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward synchronizes buffers; local.

        Returns
        -------
        bool
            False also if the module has none.
        """
        generation = self.process_group.members.generation
        if generation != self._generation:
            # A forward failed on some ranks, and a former spare has run none: all start over.
            self._generation, self.require_forward_param_sync = generation, True
        return (
            self.require_forward_param_sync
            and self.forward_sync_buffers
            and bool(self._buffers_of_module)
        )

    def go_on_from(self, syncs: bool) -> None:
        """Say for :mod:`hpcdist.elastic` whether the next forward synchronizes buffers.

        Parameters
        ----------
        syncs : bool
            The same on all ranks, which have put the buffers of a commit back.
        """
        self._generation = self.process_group.members.generation
        self.require_forward_param_sync = syncs

    def _sync_buffers(self, when: str, root: int = 0) -> None:
        if self.will_sync_module_buffers():
            futures = self._buffers_of_module.sync(when, root)
            if futures and self.reducer is not None:
                self.reducer.after_backward += futures

    def _check_parameters(self) -> None:
        for places, key, name, parameter in self._ends:
            now = places.get(key)
            if now is not parameter and isinstance(now, torch.nn.Parameter):
                raise ValueError(
                    f"parameter {name} was replaced by another one after DistributedDataParallel "
                    "was constructed, as load_state_dict(assign=True) does, so its gradient would "
                    "differ between ranks; wrap the module again, on all ranks"
                )
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise ValueError(
                    f"parameter {name} requires a gradient now but did not when "
                    "DistributedDataParallel was constructed, so its gradient would differ between "
                    "ranks; wrap the module again after changing requires_grad, on all ranks"
                )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do not average gradients in backward passes of forwards run under this context.

        They accumulate in ``parameter.grad``, and the next backward outside averages the sum. The
        place of *forward* decides. Local.

        Examples
        --------
        >>> with model.no_sync():
        ...     for batch in batches[:-1]:
        ...         loss(model(batch)).backward()
        >>> loss(model(batches[-1])).backward()
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def _describe(self, trained: list[torch.nn.Parameter]) -> None:
        group = self.process_group
        self._stats.describe(
            module_name=type(self.module).__name__,
            backend_name=group._backend,
            device_ids="" if self._inputs_to is None else str(self._inputs_to.index),
            output_device=-1 if self._inputs_to is None else self._inputs_to.index,
            world_size=group.size(),
            rank=group.rank(),
            find_unused_parameters=self.find_unused_parameters,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            broadcast_buffers=self.forward_sync_buffers,
            static_graph=self.static_graph,
            bucket_cap_bytes=self.bucket_bytes_cap,
            is_multi_device_module=False,
            has_sync_bn=any("SyncBatchNorm" in type(m).__name__ for m in self.module.modules()),
        )
        buckets = self.reducer.buckets if self.reducer is not None else []
        self._stats.constructed(trained, buckets)

    # -- copies --------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not _group.world.pg:
            raise RuntimeError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default "
                "process group, because another group cannot be found again; pickle .module, or "
                "its state_dict()"
            )
        state = self.__dict__.copy()
        for name in _OF_THIS_PROCESS:
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.process_group = member(None)
        self._set_up()


# Not copied and not pickled: rebuilt by _set_up.
_OF_THIS_PROCESS = (
    "process_group",
    "reducer",
    "_stats",
    "_frozen",
    "_ends",
    "_buffers_of_module",
    "_precision",
    "_delayed",
    "_attached",
    "_norms",
)


def _places(
    module: torch.nn.Module, named: Iterable[tuple[str, torch.nn.Parameter]]
) -> list[tuple[dict[str, Any], str, str, torch.nn.Parameter]]:
    """Find where a module keeps parameters; not those of a ScriptModule, which has no dict."""
    found = []
    for name, parameter in named:
        path, _, key = name.rpartition(".")
        owner = reduce(getattr, path.split(".") if path else (), module)
        places = owner._parameters
        if isinstance(places, dict):
            found.append((places, key, name, parameter))
    return found


def _outside_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep torch.compile, if it is in use, from tracing `function`."""
    if "torch._dynamo" not in sys.modules:
        return function
    return torch.compiler.disable(function)
