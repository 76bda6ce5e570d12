"""Jobs of hpcdist.spawn that go on without ranks that die, for test_without_launcher.py."""

from __future__ import annotations

import os
import sys

from starts import say


def dying_in_spawn(rank: int, victims: tuple[int, ...], after: str = "") -> None:
    import signal

    import hpcdist as dist

    dist.init_process_group()
    dist.barrier()
    if rank in victims:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.barrier()
    except dist.RankFailedError:
        dist.group.WORLD.reconfigure()
        say(f"rank {rank} lives on")
        if after == "raises":
            raise ValueError("boom after a death") from None
        if after == "exits":
            sys.exit(5)


def spawning_deaths() -> None:
    """A death that is survived is no failure of the job; what comes after it may be."""
    import hpcdist as dist
    from hpcdist.startup.spawn import ProcessException

    for arguments in (((1,),), ((1,), "raises"), ((1,), "exits"), ((0, 1),)):
        try:
            dist.spawn(dying_in_spawn, arguments, nprocs=2)
            say(f"{arguments} nothing raised")
        except ProcessException as error:
            first = str(error).strip().splitlines()[0]
            cause = error.__cause__
            say(f"{arguments} {type(error).__name__} of {error.error_index}: {first} {cause}")


if __name__ == "__main__":
    spawning_deaths()
