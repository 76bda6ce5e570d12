"""A training loop with accelerate; torchrun runs it over gloo.

HPCDIST_TAKE_OVER=gloo,mpi mpirun -n 2 python accelerate_loop.py
"""

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(3)
    x = torch.randn(250, 8)  # the last batches are uneven
    data = TensorDataset(x, (x.sum(1) > 0).long())
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.5)
    model, optimizer, loader, schedule = accelerator.prepare(
        model, optimizer, DataLoader(data, 16, shuffle=True), schedule
    )
    for epoch in range(3):
        model.train()
        for a, b in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(a), b)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        model.eval()
        right = 0
        for a, b in loader:
            with torch.no_grad():
                found, wanted = accelerator.gather_for_metrics((model(a).argmax(1), b))
            right += (found == wanted).sum().item()
        mean = accelerator.reduce(loss.detach(), "mean").item()
        accelerator.print(f"number accuracy{epoch} {right / len(x):.8g}", flush=True)
        accelerator.print(f"number loss{epoch} {mean:.8g}", flush=True)
    (said,) = broadcast_object_list([{"epochs": 3} if accelerator.is_main_process else None])
    assert said == {"epochs": 3}
    accelerator.end_training()


if __name__ == "__main__":
    main()
