"""The tutorial of distributed applications: synchronous SGD without DDP."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def average_gradients(model):
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)
        param.grad.data /= size


def run(rank, size):
    """Distributed synchronous SGD on a part of the data."""
    torch.manual_seed(1234)
    data = torch.randn(128, 10)[rank::size]
    model = torch.nn.Sequential(torch.nn.Linear(10, 20), torch.nn.ReLU(), torch.nn.Linear(20, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    for epoch in range(2):
        total = 0.0
        for batch in data.split(128 // (4 * size)):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(batch), batch.sum(1, keepdim=True))
            total += loss.item()
            loss.backward()
            average_gradients(model)
            optimizer.step()
        print(f"number rank{rank}.{epoch} {total / 4:.8g}", flush=True)


def init_process(rank, size, fn, backend="gloo"):
    """Initialize the distributed environment."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = os.environ.get("TEST_PORT", "29500")
    dist.init_process_group(backend, rank=rank, world_size=size)
    fn(dist.get_rank(), dist.get_world_size())


def main():
    processes = []
    mp.set_start_method("spawn")
    for rank in range(2):
        process = mp.Process(target=init_process, args=(rank, 2, run))
        process.start()
        processes.append(process)
    for process in processes:
        process.join()
        assert process.exitcode == 0


if __name__ == "__main__":
    main()
