"""In the pattern of torch's tutorial of ZeroRedundancyOptimizer."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    for sharded in (True, False):
        torch.manual_seed(0)
        model = DDP(nn.Sequential(*[nn.Linear(30, 30) for _ in range(4)]))
        if sharded:
            optimizer = ZeroRedundancyOptimizer(
                model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01
            )
        else:
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        torch.manual_seed(dist.get_rank())
        for _ in range(3):
            model(torch.randn(20, 30)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        total = sum(p.double().sum() for p in model.parameters()).item()
        if dist.get_rank() == 0:
            print(f"number weights{int(sharded)} {total:.8g}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
