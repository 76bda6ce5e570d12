"""The tutorial of distributed applications: blocking messages. It starts its processes itself."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, size):
    """Blocking point-to-point communication."""
    tensor = torch.zeros(1)
    if rank == 0:
        tensor += 1
        dist.send(tensor=tensor, dst=1)
    else:
        dist.recv(tensor=tensor, src=0)
    print(f"number rank{rank} {tensor[0]}", flush=True)


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
