"""In the pattern of torch's elastic tutorial: a trainer that goes on with its snapshot."""

import os
import tempfile

import torch
from torch import nn
from torch.distributed import broadcast_object_list, destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    def __init__(self, model, data, optimizer, path):
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.global_rank = int(os.environ["RANK"])
        self.data, self.path, self.epochs_run = data, path, 0
        self.model, self.optimizer = model, optimizer
        if os.path.exists(path):
            snapshot = torch.load(path)
            self.model.load_state_dict(snapshot["MODEL"])
            self.epochs_run = snapshot["EPOCHS"]
        self.model = DDP(self.model)

    def train(self, epochs):
        for epoch in range(self.epochs_run, epochs):
            self.data.sampler.set_epoch(epoch)
            for source, target in self.data:
                self.optimizer.zero_grad()
                loss = nn.functional.mse_loss(self.model(source), target)
                loss.backward()
                self.optimizer.step()
            if self.global_rank == 0:
                torch.save(
                    {"MODEL": self.model.module.state_dict(), "EPOCHS": epoch + 1}, self.path
                )
                print(f"number epoch{epoch} {loss.item():.8g}", flush=True)


def main():
    init_process_group(backend="gloo")
    box = [tempfile.mkdtemp() if os.environ["RANK"] == "0" else None]
    broadcast_object_list(box, src=0)
    torch.manual_seed(0)
    set_ = TensorDataset(torch.rand(64, 20), torch.rand(64, 1))
    for epochs in (2, 4):  # the second trainer begins with the snapshot of the first
        model = nn.Linear(20, 1)
        data = DataLoader(set_, 8, sampler=DistributedSampler(set_))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        trainer = Trainer(model, data, optimizer, os.path.join(box[0], "snapshot.pt"))
        trainer.train(epochs)
        torch.distributed.barrier()
    assert trainer.epochs_run == 2
    destroy_process_group()


if __name__ == "__main__":
    main()
