"""transformers' Trainer on a small BERT; torchrun runs it over gloo.

HPCDIST_TAKE_OVER=gloo,mpi mpirun -n 2 python hf_trainer.py
"""

import tempfile

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


class Parity(Dataset):
    """Sentences of random words; the label is whether the first word is even."""

    def __init__(self, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.words = torch.randint(0, 64, (size, 12), generator=generator)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict:
        return {"input_ids": self.words[index], "labels": self.words[index, 0] % 2}


def accuracy(result) -> dict:
    return {"accuracy": float((np.argmax(result.predictions, 1) == result.label_ids).mean())}


def main() -> None:
    torch.manual_seed(3)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=16,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            TrainingArguments(
                folder,
                use_cpu=True,
                num_train_epochs=1,
                per_device_train_batch_size=8,
                per_device_eval_batch_size=16,
                learning_rate=1e-3,
                logging_steps=4,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                seed=3,
            ),
            train_dataset=Parity(128, 1),
            eval_dataset=Parity(70, 2),
            compute_metrics=accuracy,
        )
        trainer.train()
        found = trainer.evaluate()
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        for number, loss in enumerate(losses):
            print(f"number loss{number} {loss}", flush=True)
        for name in ("eval_loss", "eval_accuracy"):
            print(f"number {name} {found[name]:.8g}", flush=True)


if __name__ == "__main__":
    main()
