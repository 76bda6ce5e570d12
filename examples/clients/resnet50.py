"""ResNet-50 with torch's DDP; torchrun runs it over gloo.

HPCDIST_TAKE_OVER=gloo,mpi mpirun -n 2 python resnet50.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def convolution(before: int, after: int, size: int, stride: int = 1) -> list[nn.Module]:
    layer = nn.Conv2d(before, after, size, stride, size // 2, bias=False)
    return [layer, nn.BatchNorm2d(after)]


class Bottleneck(nn.Module):
    """Three convolutions beside a shortcut."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        first, second = convolution(before, width, 1), convolution(width, width, 3, stride)
        third = convolution(width, 4 * width, 1)
        self.main = nn.Sequential(*first, nn.ReLU(), *second, nn.ReLU(), *third)
        same = before == 4 * width and stride == 1
        self.shortcut = nn.Sequential(*([] if same else convolution(before, 4 * width, 1, stride)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.main(x) + self.shortcut(x))


def resnet50(classes: int) -> nn.Sequential:
    layers = [*convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    before = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            layers.append(Bottleneck(before, width, 2 if width > 64 and block == 0 else 1))
            before = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, classes))


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    net = resnet50(10)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    generator = torch.Generator().manual_seed(5 + rank)
    for step in range(3):
        images = torch.randn(4, 3, 64, 64, generator=generator)
        labels = torch.randint(0, 10, (4,), generator=generator)
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        if rank == 0:
            print(f"number loss{step} {mean.item() / dist.get_world_size():.8g}", flush=True)
            print(f"number norm{step} {norm.item():.8g}", flush=True)
    if rank == 0:
        print(f"number variance {net[1].running_var.sum().item():.8g}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
