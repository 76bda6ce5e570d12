"""DeepSpeed's ZeRO, stages 2 and 3; torchrun runs it over gloo.

HPCDIST_TAKE_OVER=gloo,mpi mpirun -n 2 python deepspeed_zero.py
"""

import os
import tempfile

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
from torch import nn


def train(stage: int, folder: str) -> None:
    """Train, save, load into a fresh engine, and go on."""

    def engine():
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
        config = {
            "train_micro_batch_size_per_gpu": 8,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 1.0,
        }
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        return deepspeed.initialize(model=net, optimizer=optimizer, config=config)[0]

    rank, size = dist.get_rank(), dist.get_world_size()
    data = torch.randn(10, 8 * size, 16, generator=torch.Generator().manual_seed(5))
    model = engine()
    for step, batch in enumerate(data):
        if step == 5:
            model.save_checkpoint(folder, "half")
            model = engine()
            model.load_checkpoint(folder, "half")
        mine = batch[rank * 8 : (rank + 1) * 8]
        loss = nn.functional.mse_loss(model(mine), mine[:, :4].cos())
        model.backward(loss)
        model.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print(f"number zero{stage}.{step} {total.item() / size:.8g}", flush=True)


def main() -> None:
    deepspeed.init_distributed(dist_backend="gloo")
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    for stage in (2, 3):
        train(stage, os.path.join(box[0], str(stage)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
