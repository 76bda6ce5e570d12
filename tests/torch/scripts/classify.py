"""In the pattern of torch's ImageNet example: arguments, sampler, meters, a checkpoint."""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--dist-url", default="env://")
parser.add_argument("--dist-backend", default="gloo")
parser.add_argument("--world-size", default=-1, type=int)
parser.add_argument("--rank", default=-1, type=int)
parser.add_argument("--epochs", default=2, type=int)


class Meter:
    """A mean over all ranks."""

    def __init__(self, name):
        self.name, self.sum, self.count = name, 0.0, 0

    def update(self, value, n):
        self.sum, self.count = self.sum + value * n, self.count + n

    def all_reduce(self):
        total = torch.tensor([self.sum, self.count], dtype=torch.float32)
        dist.all_reduce(total, dist.ReduceOp.SUM, async_op=False)
        self.sum, self.count = total.tolist()

    def mean(self):
        return self.sum / self.count


def main():
    args = parser.parse_args()
    if args.dist_url == "env://" and args.rank == -1:
        args.rank = int(os.environ["RANK"])
    if args.world_size == -1:
        args.world_size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        backend=args.dist_backend,
        init_method=args.dist_url,
        world_size=args.world_size,
        rank=args.rank,
    )
    torch.manual_seed(0)
    images = torch.randn(96, 3, 8, 8)
    data = TensorDataset(images, (images.mean((1, 2, 3)) > 0).long())
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)
    )
    model = nn.parallel.DistributedDataParallel(net)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=1)
    best = 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        losses, top1 = Meter("loss"), Meter("acc@1")
        model.train()
        for image, target in loader:
            output = model(image)
            loss = criterion(output, target)
            losses.update(loss.item(), len(image))
            top1.update((output.argmax(1) == target).float().mean().item(), len(image))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for meter in (losses, top1):
            meter.all_reduce()
        if args.rank == 0:
            print(f"number loss{epoch} {losses.mean():.7g}", flush=True)
            print(f"number acc{epoch} {top1.mean():.7g}", flush=True)
            if top1.mean() > best:
                with tempfile.NamedTemporaryFile() as file:
                    torch.save({"epoch": epoch, "state_dict": model.state_dict()}, file.name)
        best = max(best, top1.mean())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
