"""Cases for tests/torch/bridge_same.py: every communication hook that torch brings for its DDP."""

from __future__ import annotations

import torch
import torch.distributed as td
from bridge_calls import own
from bridge_training import branches, state, train
from torch import nn
from torch.distributed.algorithms import ddp_comm_hooks
from torch.distributed.algorithms.ddp_comm_hooks import (
    ddp_zero_hook,
    default_hooks,
    optimizer_overlap_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.optim import ZeroRedundancyOptimizer, as_functional_optim
from torch.nn.parallel import DistributedDataParallel as DDP

CASES = {}


def case(function):
    CASES[function.__name__.replace("_", " ")] = function
    return function


def half(name: str) -> str:
    """Say of results that sums of 16 bits have rounded them, each backend in its own order."""
    return f"half {name}" if name.startswith("FP16") else name


def quantized(kind, bucket):
    """The average of gradients in 8 bits: what the hooks of torch compute, in one step.

    torch refuses a hook with annotations that are texts.
    """
    gradient = bucket.buffer()
    rows = gradient
    observer = torch.ao.quantization.MinMaxObserver()
    if kind == "QUANTIZE_PER_CHANNEL":
        rows = nn.functional.pad(gradient, (0, 512 - len(gradient) % 512)).view(-1, 512)
        observer = torch.ao.quantization.PerChannelMinMaxObserver()
    observer(rows)
    scale, zero = observer.calculate_qparams()
    shape = (-1, 1) if kind == "QUANTIZE_PER_CHANNEL" else (1,)
    scale, zero = scale.view(shape).float(), zero.view(shape).float()
    coarse = (torch.clamp(torch.round(rows / scale) + zero, 0, 255) - zero) * scale
    td.all_reduce(coarse)
    done: torch.futures.Future = torch.futures.Future()
    done.set_result(coarse.flatten()[: len(gradient)] / td.get_world_size())
    return done


@case
def hooks_by_name(folder: str) -> dict:
    """The members of DDPCommHookType.

    Without BF16_COMPRESS, which torch refuses where there is no CUDA, and the batched PowerSGD of
    torch 2.13, which fails at an assertion of its own, whatever the backend. NOOP is below.
    """
    found = {}
    for kind in ddp_comm_hooks.DDPCommHookType:
        if kind.name in ("NOOP", "BF16_COMPRESS") or kind.name.startswith("BATCHED"):
            continue
        quantizes = kind.name.startswith("QUANTIZE")
        torch.manual_seed(3)
        model = DDP(branches())
        if "POWER_SGD" in kind.name:
            # compress from the second step on
            rank = 2 if kind.name.endswith("2") else 1
            held = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=rank, start_powerSGD_iter=2
            )
            model.register_comm_hook(held, powerSGD_hook.powerSGD_hook)
        elif quantizes and td.get_backend() == "gloo":
            # torch's own takes the future of an all_gather for that of nccl, and fails over gloo
            model.register_comm_hook(kind.name, quantized)
        else:
            ddp_comm_hooks.register_ddp_comm_hook(kind, model, td.group.WORLD)
        train(model, 4)
        found[half(kind.name)] = state(model)
    return found


@case
def hooks_wrapped_and_built_in(folder: str) -> dict:
    found = {}
    wrapped = default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
    model = DDP(branches())
    model.register_comm_hook(None, wrapped)
    train(model)
    found[half("FP16 wrapped")] = state(model)
    model = DDP(branches())
    model._register_builtin_comm_hook(td.BuiltinCommHookType.ALLREDUCE)
    train(model)
    found["built in"] = state(model)
    model = DDP(branches())
    ddp_comm_hooks.register_ddp_comm_hook(ddp_comm_hooks.DDPCommHookType.NOOP, model)
    train(model)
    found["NOOP"] = state(model)
    return found


@case
def hook_of_post_local_SGD(folder: str) -> dict:
    own_group, _ = td.new_subgroups(td.get_world_size() // 2 or 1)
    model = DDP(branches())
    held = post_localSGD_hook.PostLocalSGDState(None, own_group, start_localSGD_iter=2)
    model.register_comm_hook(held, post_localSGD_hook.post_localSGD_hook)
    train(model, 4)
    return state(model)


@case
def hook_with_the_optimizer_inside(folder: str) -> dict:
    model = DDP(branches())
    held = optimizer_overlap_hooks._OptimizerHookState(as_functional_optim(torch.optim.SGD, 0.05))
    hook = optimizer_overlap_hooks._hook_then_optimizer(default_hooks.allreduce_hook, held)
    model.register_comm_hook(None, hook)
    for scale in (20, 10):
        model(own(4, 6) / scale).square().mean().backward()
    return state(model)


@case
def hook_with_ZeRO_inside(folder: str) -> dict:
    """torch refuses this hook over gloo; there plain DDP takes its place.

    The first two steps only learn the buckets, and leave the parameters as they are.
    """
    found = {}
    for sharded in (False, True):
        model = DDP(branches(), gradient_as_bucket_view=True, bucket_cap_mb=0.0002)
        if td.get_backend() == "gloo":
            train(model, 2, torch.optim.SGD(model.parameters(), lr=0.0))
            train(model, 3, torch.optim.SGD(model.parameters(), lr=0.05))
        else:
            optimizer = ZeroRedundancyOptimizer(
                model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.05
            )
            hook = ddp_zero_hook.hook_with_zero_step(
                default_hooks.allreduce_hook, model, optimizer, shard_buckets=sharded
            )
            model.register_comm_hook(None, hook)
            train(model, 2, optimizer)
            train(model, 3, optimizer)
        found[str(sharded)] = state(model)
    return found
