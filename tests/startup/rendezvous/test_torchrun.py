"""Starts of torchrun's workers over one store: each has keys of its own, whatever agents count."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as td

from hpcdist.errors import DistTimeoutError
from hpcdist.startup.rendezvous.torchrun import name_of_start
from hpcdist.store import HashStore

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]

_WORKER = """
from datetime import timedelta
import hpcdist
from hpcdist.startup.rendezvous.meeting import hold_roll_call
store, rank, size = next(hpcdist.rendezvous("env://", timeout=timedelta(seconds=20)))
print(hold_roll_call(store, rank, size, 20.0, "here").name)
"""


def names_of(store, order, pause):
    """What each of three ranks gets, if they come in this order."""
    found = {}
    threads = []
    for rank in order:
        call = lambda rank=rank: found.update({rank: name_of_start(store, rank, 3, 20.0)})  # noqa: E731
        threads.append(threading.Thread(target=call))
        threads[-1].start()
        time.sleep(pause)
    for thread in threads:
        thread.join()
    return {found[rank] for rank in order}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_all_get_the_name_that_rank_0_has_made_up(order):
    store = HashStore()
    store.set("asks/1", "a dead one's")
    store.set("answers/a dead one's", "an earlier start")
    first, second = names_of(store, order, 0.05), names_of(store, order, 0.3)
    assert len(first) == len(second) == 1 and first != second
    assert "an earlier start" not in first


def test_a_start_that_failed_early_answers_nobody_any_more():
    store = HashStore()
    first = name_of_start(store, 0, 2, 20.0)
    second = name_of_start(store, 0, 2, 20.0)
    assert name_of_start(store, 1, 2, 20.0) == second != first


def test_a_rank_0_that_does_not_come():
    with pytest.raises(DistTimeoutError, match=r"rank 0 has not arrived within 0\.3 s"):
        name_of_start(HashStore(), 1, 2, 0.3)


def test_a_rank_that_is_none_does_not_wait():
    assert {name_of_start(HashStore(), rank, 2, 20.0) for rank in (-1, 2)} == {"none"}


def test_workers_of_agents_that_count_differently():
    """An agent does not count the restarts for which another node is the reason."""
    agents = td.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    variables = {
        "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agents.port),
        "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    names = []
    for counts in (("0", "0"), ("0", "1")):
        workers = [
            subprocess.Popen(
                [sys.executable, "-P", "-c", _WORKER],
                env={
                    **os.environ, **variables, "RANK": str(rank),
                    "TORCHELASTIC_RESTART_COUNT": count,
                },
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, count in enumerate(counts)
        ]  # fmt: skip
        said = [worker.communicate(timeout=90)[0] for worker in workers]
        assert [worker.returncode for worker in workers] == [0, 0]
        assert said[0] == said[1]
        names.append(said[0])
    assert names[0] != names[1]
