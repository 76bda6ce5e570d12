"""Starting the default group in tests, and finding out whether it works."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch

import hpcdist as dist
from hpcdist import _engine

#: Timeout of the groups that tests start.
SHORT = timedelta(seconds=20)


def true_place() -> tuple[int, int]:
    """Rank and size, as MPI says."""
    return _engine.world_rank_size()


def one_node() -> bool:
    """Whether all ranks are on one node, as far as the default group knows: see HPCDIST_NODES."""
    return len(dist.group.WORLD.carrier.node_ranks) == dist.get_world_size()


def works() -> bool:
    """Whether an all-reduce over the default group gives the right sum."""
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    return float(total) == dist.get_world_size() * (dist.get_world_size() + 1) / 2


def outcome(**arguments) -> str:
    """Initialize, and say what came of it: the error's text or an empty string."""
    try:
        dist.init_process_group(timeout=SHORT, **arguments)
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def start_with(monkeypatch, **variables: str | None) -> str:
    """Start the default group with environment variables (None: without), as :func:`outcome` does.

    After an error it is started as the environment says.
    """
    for name, value in variables.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    said = outcome()
    monkeypatch.undo()
    if not dist.is_initialized():
        dist.init_process_group(timeout=SHORT)
    return said


def between_nodes(timeout: timedelta | None = None, check: str | None = None) -> dist.ProcessGroup:
    """Make a group of all ranks that thinks each of them is on a node of its own."""
    os.environ["HPCDIST_CHECK_TRANSPORT"] = "mpi"
    try:
        return dist.new_group(timeout=timeout, pg_options=dist.MPIOptions(check=check))
    finally:
        del os.environ["HPCDIST_CHECK_TRANSPORT"]


@contextmanager
def group_for(nodes: bool, seconds: float) -> Iterator[dist.ProcessGroup]:
    """A group of all ranks with a timeout: on this node, or as if each were on its own."""
    timeout = timedelta(seconds=seconds)
    made = between_nodes(timeout) if nodes else dist.new_group(timeout=timeout)
    try:
        yield made
    finally:
        dist.destroy_process_group(made)


#: Blocks; ranks in turn; a long node and one of a single rank; 0, 1, 1, 0, so that the nodes'
#: second ranks have another order than their first ones.
LAYOUTS = ("blocks", "in turn", "one alone", "there and back")


def layouts(size: int) -> list[str]:
    """HPCDIST_NODES of two nodes: see LAYOUTS."""
    turn = [str(r % 2) for r in range(size)]
    alone = ["0"] * (size - 1) + ["1"]
    back = [str((r + 1) // 2 % 2) for r in range(size)]
    return ["2", ",".join(turn), ",".join(alone), ",".join(back)]
