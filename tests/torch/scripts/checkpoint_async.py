"""In the pattern of torch's recipe of asynchronous checkpoints, saved while training goes on."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    saving = dist.new_group(backend="gloo")  # for the thread that saves
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    torch.manual_seed(0)
    model = DDP(nn.Linear(100, 100))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(dist.get_rank())
    pending = None
    for step in range(9):
        optimizer.zero_grad()
        model(torch.randn(4, 100)).square().mean().backward()
        optimizer.step()
        if step % 3 == 0:
            if pending is not None:
                pending.result()
            state = {"model": model.module.state_dict()}
            folder = os.path.join(box[0], str(step))
            pending = dcp.async_save(state, checkpoint_id=folder, process_group=saving)
            kept = model.module.weight.detach().double().sum().item()
    pending.result()
    read = {"model": nn.Linear(100, 100).state_dict()}
    dcp.load(read, checkpoint_id=folder)
    assert abs(read["model"]["weight"].double().sum().item() - kept) < 1e-12
    if dist.get_rank() == 0:
        print(f"number saved {kept:.8g}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
