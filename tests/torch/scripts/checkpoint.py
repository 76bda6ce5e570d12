"""In the pattern of torch's tutorial of distributed checkpoints: an app state, saved and loaded."""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard


class AppState(Stateful):
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state):
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


def build(seed):
    torch.manual_seed(seed)
    model = fully_shard(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def step(model, optimizer):
    model(torch.ones(8, 16)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def main():
    dist.init_process_group("gloo")
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    model, optimizer = build(1)
    step(model, optimizer)
    dcp.save({"app": AppState(model, optimizer)}, checkpoint_id=box[0])
    other, its = build(2)
    step(other, its)
    dcp.load({"app": AppState(other, its)}, checkpoint_id=box[0])
    step(model, optimizer)
    step(other, its)
    for name, one, two in zip("abcd", model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.to_local(), two.to_local())
        whole = two.full_tensor().sum().item()
        if dist.get_rank() == 0:
            print(f"number {name} {whole:.8g}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
