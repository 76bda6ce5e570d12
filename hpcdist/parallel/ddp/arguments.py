"""Checks and resolves the arguments of DistributedDataParallel."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from hpcdist.groups.numbers import yes_or_no
from hpcdist.groups.process_group import ProcessGroup
from hpcdist.groups.resolve import member
from hpcdist.parallel.reducer.bucket import MIB

# A small first bucket starts communication early in backward; large ones after it keep the number
# of messages low.
_FIRST_BUCKET = MIB
_DEFAULT_CAP_MB = 25.0


def bucket_caps(cap_mb: float | None, caps_mb: Sequence[float] | None) -> list[int]:
    """Return the sizes of buckets in bytes; the last one applies to all that follow."""
    for value in [*(caps_mb or ()), *(() if cap_mb is None else (cap_mb,))]:
        if not value >= 0:
            raise ValueError(f"bucket_cap_mb must be 0 or more MiB, not {value}")
    if caps_mb:
        return [int(value * MIB) for value in caps_mb]
    if cap_mb is not None:
        return [int(cap_mb * MIB)]
    return [_FIRST_BUCKET, int(_DEFAULT_CAP_MB * MIB)]


def group_of(process_group: ProcessGroup | None, device_mesh: Any) -> Any:
    """Return the group that an explicit group, a mesh of one dimension, or neither means."""
    if device_mesh is not None:
        if process_group is not None:
            raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
        if device_mesh.ndim != 1:
            raise RuntimeError(
                f"Only 1D device mesh is supported, but got {device_mesh}; take one dimension of "
                "it by name, mesh['dp']"
            )
        process_group = device_mesh.get_group(0)
    return member(process_group)


def input_device(
    parameters: Iterable[torch.Tensor], device_ids: Any, output: Any, dim: int
) -> torch.device | None:
    """Return the device for inputs, or None to leave them; raise for devices that do not fit."""
    if dim:
        raise ValueError(f"dim={dim}: it means something only with several devices per process")
    devices = {p.device for p in parameters}
    kinds = {device.type for device in devices}
    if len(kinds) > 1:
        raise ValueError(
            "DistributedDataParallel's input module must be on the same type of devices, but its "
            f"parameters are on {sorted(kinds)}"
        )
    if kinds - {"cpu", "cuda"}:
        raise ValueError(
            f"the module is on {kinds.pop()!r}, and hpcdist trains modules on CPUs and on GPUs of "
            "device type 'cuda'; move it with .to(device)"
        )
    if not device_ids and output is None:
        return None
    if kinds != {"cuda"}:
        raise ValueError(
            "device_ids and output_device only work with modules on GPUs, but got "
            f"device_ids={device_ids}, output_device={output} and parameters on {sorted(kinds)}"
        )
    if len(devices) > 1:
        raise ValueError(
            "device_ids and output_device only work with modules on one GPU, but the parameters "
            f"are on {sorted(map(str, devices))}; omit both"
        )
    chosen = list(device_ids or [output])
    if len(chosen) != 1:
        raise ValueError(f"device_ids can only be None or contain a single element, not {chosen}")
    (device,) = devices
    for name, given in (("device_ids", chosen[0]), ("output_device", output)):
        if given is not None and _index(given) != device.index:
            raise ValueError(f"{name} names {given}, but the module's parameters are on {device}")
    return device if device_ids else None


def _index(given: Any) -> int | None:
    """Return the index of a GPU, given by index, by text or as a device."""
    return given if isinstance(given, int) else torch.device(given).index


def check_tensors(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise for tensors that cannot be copied; on all ranks, because they have been compared."""
    for name, tensor in named:
        if torch.nn.parameter.is_lazy(tensor):
            raise ValueError(
                f"{name} has no shape yet; run one forward of the lazy module before wrapping it"
            )
        if tensor.layout != torch.strided:
            raise ValueError(f"{name} has layout {tensor.layout}; only dense tensors are offered")
        sides = zip(tensor.stride(), tensor.shape, strict=True)
        if tensor.numel() and any(stride == 0 and n > 1 for stride, n in sides):
            raise ValueError(
                f"{name} is expanded (shape {tuple(tensor.shape)}, stride {tensor.stride()}), so "
                "its elements share memory; make it with .clone() or .contiguous()"
            )
        wide = tensor.grad_dtype if tensor.requires_grad and tensor.is_leaf else None
        if wide not in (None, tensor.dtype):
            raise ValueError(
                f"{name} is {tensor.dtype}, but its grad_dtype is {wide}: gradients are averaged "
                "in the parameter's dtype; keep the parameter in the wider one, and use "
                "mixed_precision=MixedPrecision(param_dtype, reduce_dtype)"
            )


def sparse_indices(module: torch.nn.Module, trained: Collection[torch.Tensor]) -> list[int]:
    """Return the indices in `trained` of the parameters whose gradients will be sparse."""
    sparse = {
        id(layer.weight)
        for layer in module.modules()
        if isinstance(layer, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and layer.sparse
    }
    return [i for i, p in enumerate(trained) if id(p) in sparse]


def name_of(module: torch.nn.Module, parameter: torch.Tensor | None) -> str | None:
    """Return the name of one of the module's parameters; None if it is none of them."""
    return next((name for name, each in module.named_parameters() if each is parameter), None)


def check_delayed(named: Any, trigger: Any) -> None:
    """Raise unless both the delayed parameters and their trigger are given, or neither."""
    if (named is None) != (trigger is None):
        raise ValueError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same "
            "time."
        )


def is_false(flag: Any) -> bool:
    """Return whether a flag is given as false; not if it is no boolean at all."""
    try:
        return not yes_or_no(flag, "flag")
    except TypeError:
        return False


def which_buffers(broadcast: bool | None, forward: bool | None) -> tuple[bool, bool]:
    """Return whether buffers are copied at construction, and before forwards.

    As in torch: the older argument ``broadcast_buffers=False`` disables both, the newer one
    ``forward_sync_buffers=False`` only that before forwards.
    """
    if forward is not None:
        if broadcast is not None:
            warnings.warn(
                "broadcast_buffers is ignored where forward_sync_buffers is given",
                FutureWarning,
                stacklevel=3,
            )
        return True, yes_or_no(forward, "forward_sync_buffers")
    if broadcast is None:
        return True, True
    copied = yes_or_no(broadcast, "broadcast_buffers")
    return copied, copied
