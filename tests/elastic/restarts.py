"""A training run that is killed and started again; prints what the last start has at the end.

restarts.py KIND STEPS FOLDER [RANK=WHEN]...: KIND is sgd, adam or zero. Each victim kills itself
once in all starts, which files in FOLDER remember: WHEN is "begin5": it begins step 5; "write5": it
is in the middle of writing the commit of 5 steps; "damage5": it begins step 5, and truncates its
newest commit before.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from training import build, one_step, report

import hpcdist as dist
from hpcdist.elastic import State, elastic, memory
from hpcdist.startup.commits import folder_of_job, job_of_this_process


def die_once(folder: Path, what: str) -> None:
    try:
        (folder / f"died-{what}").touch(exist_ok=False)
    except FileExistsError:
        return
    if what.startswith("damage"):
        files = folder_of_job(job_of_this_process()).glob(f"0.[01].{dist.get_rank()}")
        newest = max(files, key=lambda file: file.stat().st_mtime_ns)
        os.truncate(newest, newest.stat().st_size - 100)
    print(f"rank {dist.get_rank()} dies: {what} at {time.time():.3f}", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def die_while_writing(state: State, folder: Path, step: int) -> None:
    """Die between the head and the payload of a file."""
    write = memory.Memory.write

    def interrupted(self, name, pieces):
        class Pieces(list):
            reads = 0

            def __iter__(self):
                self.reads += 1  # the first is for the length
                for number, piece in enumerate(super().__iter__()):
                    if self.reads == 2 and number == 1 and state.step == step:
                        die_once(folder, f"write{step}")
                    yield piece

        write(self, name, Pieces(pieces))

    memory.Memory.write = interrupted


def main() -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(100, exit=True)
    dist.init_process_group(timeout=timedelta(seconds=40))
    kind, steps, folder, *deaths = sys.argv[1:]
    victims = dict(death.split("=") for death in deaths)
    when = victims.get(str(dist.get_rank()), "")
    model, optimizer = build(kind)
    state = State(model=model, optimizer=optimizer)
    state.values.sizes = {}
    how, at = re.fullmatch(r"([a-z]*)(\d*)", when).groups()
    if how == "write":
        die_while_writing(state, Path(folder), int(at))
    for step in elastic(state, int(steps)):
        with step:
            if how in ("begin", "damage") and step.index == int(at):
                die_once(Path(folder), when)
            one_step(model, optimizer, step.index, step.shares(), step.share_count)
            if step.index == state.began > 0 and dist.get_rank() == 0:
                print(f"again at {time.time():.3f}", flush=True)
            state.values.sizes[step.index] = dist.get_world_size()
            state.values.drawn = torch.rand(1).item()  # random numbers go on, too
    sizes = "".join(str(state.values.sizes[i]) for i in range(int(steps)))
    found = report(sizes, model, optimizer)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (found.partition(" optimizer")[0], state.values.drawn))
    assert len({each for each, _ in everyone}) == 1, everyone
    if dist.get_rank() == 0:
        print(f"{kind} {found} began {state.began} drawn {[each for _, each in everyone]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
