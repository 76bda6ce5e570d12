"""Batch normalisation over the batches of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import Function
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from hpcdist._ops import ReduceOp
from hpcdist.groups import state as _group
from hpcdist.groups.comparison import digest, naming
from hpcdist.groups.process_group import ProcessGroup
from hpcdist.groups.resolve import member
from hpcdist.nn._nodes import AllReduce
from hpcdist.parallel.reducer import beside
from hpcdist.parallel.reducer.copies import unseen

# The names that peers see of the calls of forward and backward, and of backward for derivatives of
# its results, which makes other calls: all ranks must ask for them.
API = "SyncBatchNorm"
API_BACKWARD = f"backward of {API}"
API_GRAPH = f"{API_BACKWARD} with create_graph"


class SyncBatchNorm(torch.nn.SyncBatchNorm):
    """Normalise with the mean and variance of all ranks' batches together.

    In training all ranks of the group must run forward and backward through it; batches may have
    different sizes, also none. In evaluation, and without hpcdist's default group, it is an
    ordinary batch normalisation. CPU tensors work too.

    Parameters
    ----------
    num_features : int
        Channels C of the input, of shape ``(N, C, ...)``.
    eps : float
        Added to the variance.
    momentum : float, optional
        Weight of a new batch in the running statistics. None: the plain average of all batches.
    affine : bool
        Scale and shift with trained parameters.
    track_running_stats : bool
        Keep running statistics for evaluation.
    process_group : ProcessGroup, optional
        The ranks that share statistics. None means the default group.
    device : torch.device, optional
        Device of parameters and buffers.
    dtype : torch.dtype, optional
        Type of parameters and buffers.
    bias : bool
        Shift, if `affine` is true. False keeps only the scale, with any torch.

    Raises
    ------
    ValueError
        In forward, if the input has fewer than two dimensions or no channels.
    TypeError
        In forward, if the input, the weight or the bias is complex or contains integers.
    DistMismatchError
        In forward, on all ranks, if their channels, `eps` or `momentum` differ.

    Notes
    -----
    Forward makes one all-gather of ``2 C + 1`` numbers, backward one all-reduce of ``2 C``. With
    ``create_graph=True``, on all ranks or on none, backward makes two more, of ``C`` numbers each.
    Its results can then be differentiated any number of times, by the same backward passes on all
    ranks. In a group of one rank the layer is torch's, whose third derivatives take the statistics
    as constants. Source: ``torch.nn.SyncBatchNorm``, which it derives from and which takes CUDA
    tensors only.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: ProcessGroup | None = None,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, process_group, device, dtype
        )
        if not bias:  # torch before 2.13 has no such argument
            self.register_parameter("bias", None)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise a batch.

        In training all ranks must call it.

        Parameters
        ----------
        input : torch.Tensor
            Shape ``(N, C, ...)``.

        Returns
        -------
        torch.Tensor
            Of the same shape.

        Raises
        ------
        ValueError
            If the input has fewer than two dimensions or no channels.
        TypeError
            If the input, the weight or the bias does not contain floating point numbers.
        DistMismatchError
            On all ranks, if their channels, `eps` or `momentum` differ.
        """
        self._check_input_dim(input)
        if input.size(1) == 0:
            raise ValueError("SyncBatchNorm needs at least one channel; the input has none")
        _check_real(input=input, weight=self.weight, bias=self.bias)
        tracked = self.training and self.track_running_stats
        factor = 0.0 if self.momentum is None else self.momentum
        if tracked and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        by_batch = self.training or self.running_mean is None
        keep = not self.training or self.track_running_stats
        mean, var = (self.running_mean, self.running_var) if keep else (None, None)
        if self.training and _group.is_initialized():
            group = member(self.process_group)
            if group.size() > 1:
                agreed = self.eps, self.momentum
                with naming("eps={}, momentum={} of this rank".format(*agreed)):
                    return _Normalize.apply(
                        input, self.weight, self.bias, mean, var, factor, self.eps, group, agreed
                    )
        return F.batch_norm(input, mean, var, self.weight, self.bias, by_batch, factor, self.eps)

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_group: ProcessGroup | None = None
    ) -> torch.nn.Module:
        """Replace every batch normalisation layer in a module by this class.

        Local; call it on all ranks, before :class:`~hpcdist.DistributedDataParallel` wraps the
        module.

        Parameters
        ----------
        module : torch.nn.Module
            Changed in place, unless it is a batch normalisation itself.
        process_group : ProcessGroup, optional
            The ranks that share statistics. None means the default group.

        Returns
        -------
        torch.nn.Module
            The module, or its replacement. Parameters and buffers are the same tensors.

        Raises
        ------
        ValueError
            If a lazy layer has not seen a batch yet, so that it has no parameters; nothing is
            changed then.
        """
        _check_initialized(module)
        return cls._converted(module, process_group, {})

    @classmethod
    def _converted(
        cls,
        module: torch.nn.Module,
        process_group: ProcessGroup | None,
        done: dict[int, torch.nn.Module],
    ) -> torch.nn.Module:
        if id(module) in done:  # a module may have several names, also in one parent
            return done[id(module)]
        if isinstance(module, _BatchNorm):
            converted = cls(
                module.num_features,
                module.eps,
                module.momentum,
                module.affine,
                module.track_running_stats,
                process_group,
                bias=module.bias is not None,
            )
            for name in ("weight", "bias"):
                setattr(converted, name, getattr(module, name))
            for name in ("running_mean", "running_var", "num_batches_tracked"):
                setattr(converted, name, getattr(module, name))
            converted.training = module.training
            done[id(module)] = done[id(converted)] = converted
            return converted
        done[id(module)] = module
        for name, child in list(module._modules.items()):
            if child is not None:
                replaced = cls._converted(child, process_group, done)
                if replaced is not child:
                    setattr(module, name, replaced)
        return module


class TorchLayers:
    """Lets torch's SyncBatchNorm layers in a module share statistics between hpcdist's ranks.

    These layers ask torch.distributed for the ranks. If that is not initialised, each rank would
    silently normalise by itself.

    Local to this process.

    Parameters
    ----------
    holder : dict
        The children of a wrapper, with the module to look at as ``"module"``. Layers in it become
        hpcdist's, in place: references to them stay valid.

    Raises
    ------
    ValueError
        For a class that derives from torch's, which may count on torch.distributed.
    """

    def __init__(self, holder: dict[str, Any]) -> None:
        self._holder = holder
        self._take()

    def check(self) -> None:
        """Look again if a layer was replaced, as by ``convert_sync_batchnorm`` after wrapping."""
        for children, name, layer in self._places:
            if children.get(name) is not layer:
                self._take()
                return

    def _take(self) -> None:
        module = self._holder["module"]
        for name, layer in module.named_modules():
            if isinstance(layer, torch.nn.SyncBatchNorm) and not isinstance(layer, SyncBatchNorm):
                _take_over(name, layer)
        parents = [self._holder, *(each._modules for each in module.modules())]
        self._places = [
            (children, name, child)
            for children in parents
            for name, child in children.items()
            if isinstance(child, _BatchNorm)
        ]


def _check_initialized(module: torch.nn.Module) -> None:
    for name, layer in module.named_modules():
        if isinstance(layer, LazyModuleMixin) and isinstance(layer, _BatchNorm):
            if layer.has_uninitialized_params():
                raise ValueError(
                    f"{name or 'the module'} is a {type(layer).__name__} that has seen no batch "
                    "yet, so its number of channels is unknown: run a batch through the module "
                    "on every rank, then convert it"
                )


def _check_real(**tensors: torch.Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_floating_point():
            raise TypeError(
                f"SyncBatchNorm normalises floating point numbers, but its {name} is of "
                f"{tensor.dtype}; of complex numbers normalise torch.view_as_real(x) instead"
            )


def _take_over(name: str, layer: torch.nn.SyncBatchNorm) -> None:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        # a library may have initialised it for this process alone
        own_group = isinstance(layer.process_group, torch.distributed.ProcessGroup)
        if own_group or torch.distributed.get_world_size() >= member(None).size():
            return
    if type(layer) is not torch.nn.SyncBatchNorm:
        raise ValueError(
            f"{name or 'the module'} is a {type(layer).__name__}, which derives from torch's "
            "SyncBatchNorm and would normalise each rank by itself, because torch.distributed "
            "is not initialised between all ranks: derive it from hpcdist.parallel.SyncBatchNorm, "
            "or initialise torch.distributed too, by hpcdist.torch.init_process_group()"
        )
    layer.__class__ = SyncBatchNorm


class _Normalize(Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        momentum: float,
        eps: float,
        group: ProcessGroup,
        agreed: tuple[Any, ...],
    ) -> torch.Tensor:
        channels = input.size(1)
        axes = [axis for axis in range(input.dim()) if axis != 1]
        # Halves are summed in float32.
        kind = torch.promote_types(input.dtype, torch.float32)
        own = torch.zeros(2 * channels + 1, dtype=kind, device=input.device)
        local = input.numel() // channels
        if local:
            wide = input.to(kind)
            own[channels:-1], own[:channels] = torch.var_mean(wide, axes, correction=0)
            own[-1] = local
        everyone = own.new_empty(group.size(), own.numel())
        extra = digest(*(None if number is None else float(number) for number in agreed))
        group.carrier.all_gather_into_tensor(everyone, own, api=API, extra=extra)
        means, variances, counts = everyone.split([channels, channels, 1], 1)
        count = counts.sum()
        if not count:
            raise ValueError("SyncBatchNorm got an empty batch on every rank")
        mean = (means * counts).sum(0) / count
        var = ((variances + (means - mean).square()) * counts).sum(0) / count
        if running_mean is not None and running_var is not None:
            unbiased = var * (count / (count - 1).clamp_(min=1))
            # an evaluation may have saved them for its backward pass, as with torch's layers
            with unseen((running_mean, running_var)):
                running_mean.lerp_(mean.to(running_mean.dtype), momentum)
                running_var.lerp_(unbiased.to(running_var.dtype), momentum)
        ctx.save_for_backward(input, weight, mean, torch.rsqrt(var + eps), count)
        ctx.group, ctx.axes, ctx.eps = group, axes, eps
        beside.announce(ctx)
        ctx.of_bias = None if bias is None else bias.dtype
        same = [None if p is None else p.to(kind) for p in (weight, bias)]
        out = F.batch_norm(input.to(kind), mean, var, same[0], same[1], False, 0.0, eps)
        return out.to(input.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        input, weight, mean, scale, count = ctx.saved_tensors
        graph = torch.is_grad_enabled()  # create_graph=True
        shape = [1, -1] + [1] * (input.dim() - 2)
        wide = gradient.to(mean.dtype)
        if graph:
            normal, scale = _normalized_again(ctx, input.to(mean.dtype), shape, count)
        else:
            normal = (input.to(mean.dtype) - mean.view(shape)).mul_(scale.view(shape))
        sums = torch.cat([wide.sum(ctx.axes), (wide * normal).sum(ctx.axes)])
        to_bias, to_weight = sums.chunk(2)
        result = None
        # Always, even if this rank does not need it: other ranks may.
        of_gradient, of_normal = (_summed(ctx, sums) / count).chunk(2)
        if ctx.needs_input_grad[0]:
            result = wide - of_gradient.view(shape)
            result.sub_(torch.mul(normal, of_normal.view(shape), out=None if graph else normal))
            factor = scale if weight is None else scale * weight.to(scale.dtype)
            result = result.mul_(factor.view(shape)).to(gradient.dtype)
        grad_weight = None if weight is None else to_weight.to(weight.dtype)
        grad_bias = to_bias.to(ctx.of_bias) if ctx.needs_input_grad[2] else None
        return result, grad_weight, grad_bias, None, None, None, None, None, None


def _normalized_again(
    ctx: Any, own: torch.Tensor, shape: Sequence[int], count: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The normalised input and the scale, of nodes that autograd goes through.

    The saved mean and scale are constants to autograd, but depend on the inputs of all ranks.
    """
    if not own.requires_grad:  # other ranks' may: all make the same calls when they differentiate
        own = own.detach().requires_grad_()
    mean = _summed(ctx, own.sum(ctx.axes)) / count
    centred = own - mean.view(shape)
    var = _summed(ctx, centred.square().sum(ctx.axes)) / count
    scale = torch.rsqrt(var + ctx.eps)
    return centred * scale.view(shape), scale


def _summed(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
    name = API_GRAPH if torch.is_grad_enabled() else API_BACKWARD
    with beside.calling(ctx):
        return AllReduce.apply(tensor, ReduceOp.SUM, ctx.group, name)
