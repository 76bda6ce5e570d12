"""In the pattern of torch's tutorial of FSDP2: shard, train, gather the state, load it."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def build():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def main():
    dist.init_process_group(backend="gloo")
    rank = dist.get_rank()
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    torch.manual_seed(rank)
    for step in range(5):
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        whole = norm.full_tensor().item()
        if rank == 0:
            print(f"number loss{step} {loss.item():.8g}\nnumber norm{step} {whole:.8g}", flush=True)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    again = build()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(again, state, options=options)
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one.to_local(), other.to_local())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
