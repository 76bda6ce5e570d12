"""Lightning's Trainer with DDP; torchrun runs it over gloo.

HPCDIST_TAKE_OVER=gloo,mpi mpirun -n 2 python lightning_trainer.py
"""

import os
import warnings

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")


class Regression(lightning.LightningModule):
    """A small network, and what it logs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("train", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        self.log("valid", nn.functional.mse_loss(self.net(x), y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main() -> None:
    lightning.seed_everything(3, verbose=False)
    x = torch.randn(256, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True).sin())
    module = Regression()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy="ddp",
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data, 16, shuffle=True), DataLoader(data, 32))
    if trainer.is_global_zero:
        for name, value in sorted(trainer.callback_metrics.items()):
            print(f"number {name} {value.item():.8g}", flush=True)
        print(f"number weights {sum(p.sum() for p in module.parameters()).item():.8g}", flush=True)


if __name__ == "__main__":
    main()
