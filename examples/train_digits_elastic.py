"""Train on handwritten digits while ranks are killed.

    HPCDIST_FT=1 mpirun --with-ft ulfm -n 4 python examples/train_digits_elastic.py
    HPCDIST_FT=1 mpirun --with-ft ulfm -n 4 python examples/train_digits_elastic.py --kill 1 2
    python -m hpcdist launch -n 4 --max-restarts 2 examples/train_digits_elastic.py --kill 1 2

With --keep-batch the others compute the dead ranks' shares of the batch too, and the model is, bit
for bit, that of a run without deaths. So it is with HPCDIST_SPARES=2 and -n 6 in the second one:
the last two processes wait, and take the dead ranks' places.

The same training as train_digits.py: the same model, data, batches and learning rates. At chosen
moments ranks kill themselves with SIGKILL. The others go on from the last step that all had
finished, in the same batches, and the program prints what was lost. Without Open MPI's fault
tolerance the job ends with the rank; the third command starts it again then, with any MPI, and
it goes on from the last step as well.
"""

from __future__ import annotations

import argparse
import os
import signal
import time

import torch
from torch.nn import functional as F
from train_digits import DECAY, build_model, check_equal, evaluate, load_data
from where import add_options, start

import hpcdist as dist
from hpcdist.elastic import State, elastic, joining


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train on handwritten digits while ranks are killed.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training data")
    parser.add_argument("--batch-size", type=int, default=60, help="samples, all ranks together")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate in the first epoch")
    parser.add_argument("--kill", type=int, nargs="*", default=[], metavar="RANK",
                        help="ranks that kill themselves, one after the other")  # fmt: skip
    parser.add_argument("--keep-batch", action="store_true",
                        help="compute the shares of dead ranks, too")  # fmt: skip
    return add_options(parser).parse_args()


def main() -> None:
    arguments = parse()
    images, labels, test_images, test_labels = load_data()
    start(arguments)  # init_process_group
    torch.set_num_threads(1)
    torch.manual_seed(0)
    me, ranks = dist.get_rank(), dist.get_world_size()
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.9)
    parallel = dist.DistributedDataParallel(model)
    each = len(images) // arguments.batch_size
    steps = arguments.epochs * each
    # evenly over the run, each in the middle of an epoch
    deaths = {
        rank: (place + 1) * steps // (len(arguments.kill) + 1) + each // 2
        for place, rank in enumerate(arguments.kill)
    }

    if joining():
        deaths = {}  # a former spare does not die of what its place's first rank did
    state = State(model=parallel, optimizer=optimizer)
    began = time.perf_counter()
    for step in elastic(state, steps, keep_batch=arguments.keep_batch):
        with step:
            epoch, place = divmod(step.index, each)
            order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
            batch = order[place * arguments.batch_size : (place + 1) * arguments.batch_size]
            for group in optimizer.param_groups:
                group["lr"] = arguments.lr * DECAY**epoch
            optimizer.zero_grad()
            for share in step.shares():  # without --keep-batch this rank's alone
                mine = batch[share :: step.share_count]
                loss = F.cross_entropy(parallel(images[mine]), labels[mine])
                if step.index == deaths.get(me) and step.index > state.began:
                    os.kill(os.getpid(), signal.SIGKILL)
                loss.backward()
            optimizer.step()
    seconds = time.perf_counter() - began

    accuracy, same = evaluate(model, test_images, test_labels), check_equal(model)
    if dist.get_rank() == 0:
        left = dist.get_world_size()
        print(f"{ranks} ranks began, {left} ended; {state.step} steps in {seconds:.1f} s")
        if state.began:
            print(f"the last start of the job went on from step {state.began}")
        for lost in state.lost:
            print(f"lost: rank {', '.join(map(str, lost))} of the ranks there were then")
        print(f"steps begun and repeated: {state.repeated}; recovery took {state.seconds:.3f} s")
        print(f"test accuracy {accuracy:.2%}")
        print(f"parameters equal on all ranks: {same}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
