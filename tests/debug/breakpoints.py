"""Stops rank RANK at a breakpoint: python breakpoints.py RANK [TIMEOUT OF THE GROUP].

With a third argument the ranks go on after an exception.
"""

import sys
import time
from datetime import timedelta

import hpcdist as dist

dist.init_process_group()
rank = dist.get_rank()
dist.group.WORLD.timeout = timedelta(seconds=float(sys.argv[2]) if sys.argv[2:] else 1)


def train(step):
    secret = f"only-rank-{rank}-knows-{step}"
    before = time.monotonic()
    dist.breakpoint(int(sys.argv[1]), skip=1)
    after = time.monotonic()
    return secret, after - before


_, first = train(0)
second = 0.0
try:
    _, second = train(1)
except BaseException as error:
    if not sys.argv[3:]:
        raise
    print(f"rank {rank} caught {type(error).__name__}: {error}", flush=True)
dist.barrier()
# the others have waited longer than the group's timeout, and without an error
print(f"rank {rank} waited {first:.1f} {second:.1f}", flush=True)
