"""DistributedDataParallel: a module that averages its gradients between ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hpcdist import group as _group
from hpcdist.parallel.bucket import MIB
from hpcdist.parallel.grad_bucket import GradBucket
from hpcdist.parallel.reducer import API, Reducer
from hpcdist.parallel.sync import broadcast_tensors
from hpcdist.parallel.verify import describe, verify_same

__all__ = ["DistributedDataParallel"]

# A small first bucket lets communication begin soon after backward has begun; large ones after it
# keep the number of messages low.
_FIRST_BUCKET = MIB
_DEFAULT_CAP_MB = 25.0


class DistributedDataParallel(torch.nn.Module):
    """Train one replica of a module per rank on different data, with the same parameters.

    Construction compares the module between ranks and copies rank 0's parameters and buffers to
    the others. After that every backward pass ends with ``parameter.grad`` holding the average of
    all ranks' gradients, equal on all ranks to the last bit, so that equal optimizers take equal
    steps. Gradients travel in buckets, each of which starts as soon as it is full, while backward
    computes the rest.

    All ranks of the group must construct it, and must run forward and backward together (not
    under :meth:`no_sync`).

    Parameters
    ----------
    module : torch.nn.Module
        Whose parameters are to be trained, in its final form: parameters added or unfrozen after
        this are not averaged. It stays usable on its own as ``.module``.
    device_ids, output_device : None
        For modules on CUDA devices, which hpcdist does not train yet: None (or empty).
    dim : int
        0. (It means something only with several devices per process.)
    broadcast_buffers : bool
        Copy rank 0's buffers (running means and the like) to all ranks at the start of each
        forward that follows a forward which averages gradients.
    init_sync : bool
        False: skip the comparison and the copy at construction. The caller then answers for it
        that modules are equal.
    process_group : ProcessGroup, optional
        The ranks that train together. Default: the default group.
    bucket_cap_mb : float, optional
        Size of a bucket, MiB. Default: 1 for the first bucket of each dtype and 25 for the rest;
        if given, it holds for the first one too. 0 gives each parameter its own.
    find_unused_parameters : bool
        False. Parameters that get no gradient are an error that names them.
    check_reduction : bool
        Ignored; kept because torch's signature has it.
    gradient_as_bucket_view : bool
        Let gradients be views of the buckets: saves one copy of all gradients in memory and two
        in time. ``parameter.grad.detach_()`` is then not allowed.
    static_graph, delay_all_reduce_named_params, param_to_hook_all_reduce, mixed_precision, \
device_mesh
        Not available yet: only their defaults are accepted.

    Raises
    ------
    DistMismatchError
        On all ranks, if the ranks' modules or arguments differ; names the rank and the parameter.
    ValueError
        If an argument is out of range or not available, if this process is not in the group, or
        if no parameter requires a gradient.
    TypeError
        If `module` is no ``torch.nn.Module``.

    Notes
    -----
    ``torch.nn.parallel.DistributedDataParallel`` is the model for names and meanings. Unlike it,
    the first iteration already overlaps, the unused-parameter error comes at the end of the
    backward pass in which it happens, and a second backward through an earlier forward is averaged
    too.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
    ) -> None:
        super().__init__()
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, not {type(module).__name__}")
        _only_defaults(
            device_ids=device_ids or None,
            output_device=output_device,
            dim=dim or None,
            find_unused_parameters=find_unused_parameters or None,
            static_graph=static_graph or None,
            delay_all_reduce_named_params=delay_all_reduce_named_params,
            param_to_hook_all_reduce=param_to_hook_all_reduce,
            mixed_precision=mixed_precision,
            device_mesh=device_mesh,
        )
        if bucket_cap_mb is not None and not bucket_cap_mb >= 0:
            raise ValueError(f"bucket_cap_mb must be 0 or more MiB, not {bucket_cap_mb}")
        cap = int((_DEFAULT_CAP_MB if bucket_cap_mb is None else bucket_cap_mb) * MIB)
        caps = [_FIRST_BUCKET, cap] if bucket_cap_mb is None else [cap]

        self.module = module
        self.process_group = _group.member(process_group)
        self.broadcast_buffers = bool(broadcast_buffers)
        self.find_unused_parameters = False
        self.gradient_as_bucket_view = bool(gradient_as_bucket_view)
        self.static_graph = False
        self.bucket_bytes_cap = cap
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True

        named = list(module.named_parameters())
        if init_sync:
            arguments = {
                "bucket_cap_mb": bucket_cap_mb,
                "broadcast_buffers": self.broadcast_buffers,
            }
            entries = [["argument", k, {"value": str(v)}] for k, v in arguments.items()]
            entries += describe("parameter", named) + describe("buffer", module.named_buffers())
            verify_same(self.process_group, entries)
        _check_tensors(named + list(module.named_buffers()))
        trained = [(name, p) for name, p in named if p.requires_grad]
        if not trained:
            raise ValueError(
                "DistributedDataParallel is not needed when a module has no parameter that "
                "requires a gradient"
            )
        if init_sync:
            tensors = [p for _, p in named] + list(module.buffers())
            broadcast_tensors(self.process_group, tensors, api=API)
        self._frozen = [(name, p) for name, p in named if not p.requires_grad]
        # Where the buffers are kept, not the tensors: a module may put another one in the place.
        self._buffer_places = [
            (owner, name)
            for owner in module.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        self.reducer = Reducer(
            trained, self.process_group, caps, as_view=self.gradient_as_bucket_view
        )

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
            If an earlier backward pass failed to average gradients, or a parameter that was frozen
            at construction now requires a gradient.
        """
        averaging = torch.is_grad_enabled() and self.require_backward_grad_sync
        self.reducer.check()
        if averaging:
            self._check_frozen()
        if self.broadcast_buffers and self.require_forward_param_sync and self._buffer_places:
            buffers = [owner._buffers[name] for owner, name in self._buffer_places]
            broadcast_tensors(
                self.process_group, [b for b in buffers if b is not None], api=f"{API} buffers"
            )
        output = self.module(*args, **kwargs)
        # Buffers of other ranks have moved away from rank 0's only if this was a training step.
        self.require_forward_param_sync = averaging
        if averaging:
            self.reducer.expect(output)
        elif torch.is_grad_enabled():
            self.reducer.keep_local()
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients as they are in backward passes of forwards run under this context.

        They accumulate in ``parameter.grad``, and the next backward outside averages the sum. What
        counts is where *forward* ran. Local.

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

    def register_comm_hook(
        self, state: Any, hook: Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]
    ) -> None:
        """Let a function of your own move the gradients between ranks, in place of the average.

        All ranks must register the same hook, before the first backward pass; it can be done once.

        Parameters
        ----------
        state : object
            Passed to the hook as it is: error feedback, groups, counters, or None.
        hook : callable
            ``hook(state, bucket) -> torch.futures.Future`` of a tensor. Called during backward for
            each bucket in the order of its index, as soon as the gradients in it are there. They
            are not divided by the number of ranks. The tensor in the future, of as many elements as
            ``bucket.buffer()``, becomes the bucket's gradients.

        Raises
        ------
        TypeError
            If `hook` cannot be called.
        RuntimeError
            If a hook is registered already.

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
            raise TypeError(f"Communication hook must be callable, not {type(hook).__name__}")
        if self.reducer.has_hook:
            raise RuntimeError("register_comm_hook can only be called once")
        self.reducer.set_hook(state, hook)

    @property
    def communication_seconds(self) -> float:
        """Seconds this rank waited for gradients at the end of backward, since construction.

        What backward did not hide; reading it is local.
        """
        return self.reducer.wait_seconds

    def _check_frozen(self) -> None:
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise ValueError(
                    f"parameter {name} requires a gradient now but did not when "
                    "DistributedDataParallel was constructed, so its gradient would differ between "
                    "ranks; wrap the module again after changing requires_grad, on all ranks"
                )


def _only_defaults(**arguments: Any) -> None:
    """Refuse arguments whose default (None here) was changed."""
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(
                f"hpcdist's DistributedDataParallel does not offer {name}={value!r} yet; leave it "
                "at its default"
            )


def _check_tensors(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Refuse what cannot be copied; the same on all ranks, because they have been compared."""
    for name, tensor in named:
        if torch.nn.parameter.is_lazy(tensor):
            raise ValueError(
                f"{name} has no shape yet; run one forward of the lazy module before wrapping it"
            )
        if tensor.layout != torch.strided:
            raise ValueError(f"{name} has layout {tensor.layout}; only dense tensors are offered")
        if any(st == 0 and n > 1 for st, n in zip(tensor.stride(), tensor.shape, strict=True)):
            raise ValueError(
                f"{name} is expanded (shape {tuple(tensor.shape)}, stride {tensor.stride()}), so "
                "its elements share memory; make it with .clone() or .contiguous()"
            )
