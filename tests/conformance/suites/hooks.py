"""DDP's communication hooks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from worlds import Case, World, suite

CASES: dict[str, Case] = {}
case = suite(CASES)


def net() -> nn.Sequential:
    torch.manual_seed(9)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 3))


def trained(world: World, register: Any, steps: int = 4, **options: Any) -> list[torch.Tensor]:
    """The parameters after some steps with a hook, and the last gradients."""
    model = world.DDP(net(), **options)
    register(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + world.rank)
        optimizer.zero_grad()
        model(torch.randn(5, 6, generator=generator)).pow(2).mean().backward()
        optimizer.step()
    found = [p.detach().clone() for p in model.parameters()]
    return found + [p.grad.clone() for p in model.parameters()]


@case()
def plain_and_compressed(world: World) -> Any:
    default = world.at("algorithms.ddp_comm_hooks.default_hooks")
    group = world.dist.distributed_c10d._get_default_group()
    found = {"none": trained(world, lambda model: None)}
    for name in ("allreduce_hook", "fp16_compress_hook"):
        hook = getattr(default, name)
        key = name if "compress" not in name else f"half {name}"
        found[key] = trained(world, lambda model, h=hook: model.register_comm_hook(group, h))
    return found


@case()
def wrapped(world: World) -> Any:
    default = world.at("algorithms.ddp_comm_hooks.default_hooks")
    hook = default.fp16_compress_wrapper(default.allreduce_hook)
    return {"half": trained(world, lambda model: model.register_comm_hook(None, hook))}


@case()
def nothing_is_reduced(world: World) -> Any:
    noop = world.at("algorithms.ddp_comm_hooks.debugging_hooks").noop_hook
    return trained(world, lambda model: model.register_comm_hook(None, noop))


@case()
def powersgd(world: World) -> Any:
    module = world.at("algorithms.ddp_comm_hooks.powerSGD_hook")
    found = {}
    for name in ("powerSGD_hook", "batched_powerSGD_hook"):
        # until start_powerSGD_iter it is a plain all_reduce: those steps are compared exactly
        state = module.PowerSGDState(None, start_powerSGD_iter=50)
        hook = getattr(module, name)
        found[name] = trained(world, lambda m, s=state, h=hook: m.register_comm_hook(s, h))
    # the batched one fails at an assertion of torch's own without a GPU
    state = module.PowerSGDState(None, matrix_approximation_rank=16, start_powerSGD_iter=2)
    hook = module.powerSGD_hook
    after = trained(world, lambda m: m.register_comm_hook(state, hook))
    found["compressed"] = all(bool(t.isfinite().all()) for t in after)
    return found


@case("bridge", "native")
def quantized(world: World) -> Any:
    """Eight bits are near to the exact sum; torch's hooks cannot read the futures of gloo."""
    module = world.at("algorithms.ddp_comm_hooks.quantization_hooks")
    group = world.dist.distributed_c10d._get_default_group()
    exact = trained(world, lambda model: None, 1)
    found = {}
    for name in ("quantization_pertensor_hook", "quantization_perchannel_hook"):
        hook = getattr(module, name)
        near = trained(world, lambda model, h=hook: model.register_comm_hook(group, h), 1)
        half = len(near) // 2
        # torch's hooks add up, DDP does not divide after them
        gradients = [g / world.size for g in near[half:]]
        errors = [float((g - e).abs().max()) for g, e in zip(gradients, exact[half:], strict=True)]
        whole = [float((g - e).abs().max()) for g, e in zip(near[half:], exact[half:], strict=True)]
        found[name] = min(max(errors), max(whole)) < 0.1
    return found


@case()
def written_by_the_user(world: World) -> Any:
    """A hook of its own: a future of a sum, divided after it; and what it sees of the bucket."""
    seen = []

    def hook(state, bucket):  # torch refuses other annotations than its own
        seen.append([bucket.index(), bucket.buffer().numel(), len(bucket.gradients()),
                     len(bucket.parameters()), bucket.is_last()])  # fmt: skip
        work = world.dist.all_reduce(bucket.buffer(), async_op=True)

        def divide(future: Any) -> torch.Tensor:
            value = future.value()
            return (value[0] if isinstance(value, list) else value) / world.size

        return work.get_future().then(divide)

    return [trained(world, lambda model: model.register_comm_hook(None, hook)), seen]


@case()
def by_enumeration(world: World) -> Any:
    module = world.at("algorithms.ddp_comm_hooks")
    kinds = module.DDPCommHookType
    return {
        kind.name if "COMPRESS" not in kind.name else f"half {kind.name}": trained(
            world, lambda model, k=kind: module.register_ddp_comm_hook(k, model)
        )
        for kind in (kinds.ALLREDUCE, kinds.FP16_COMPRESS, kinds.NOOP)
    }


@case()
def post_local_sgd(world: World) -> Any:
    module = world.at("algorithms.ddp_comm_hooks.post_localSGD_hook")
    alone = [world.dist.new_group([rank]) for rank in range(world.size)][world.rank]
    state = module.PostLocalSGDState(None, alone, start_localSGD_iter=2)
    hook = module.post_localSGD_hook
    return trained(world, lambda model: model.register_comm_hook(state, hook))
