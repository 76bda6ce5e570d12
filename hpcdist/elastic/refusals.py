"""What a State cannot do: with spares, shares of a batch, shards; all ranks say so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcdist.elastic.parts import Part
from hpcdist.elastic.shards import Shards, StateLostError
from hpcdist.groups.world import world

#: The numbers of the States that have begun to commit, and whether only one may.
_begun: set[int] = set()
_alone = False


def refuse_second(number: int, alone: bool = False) -> None:
    """Raise ValueError if several States have commits where a recovery could serve one alone.

    So it is with spares, which get one State, and with shares of a batch, which a recovery deals
    anew.

    Parameters
    ----------
    number : int
        Which State of its program begins, or goes on.
    alone : bool
        Whether it must be the only one.
    """
    global _alone
    _begun.add(number)
    _alone = _alone or alone
    if len(_begun) > 1 and (world.spares or _alone):
        why = "spares (HPCDIST_SPARES)" if world.spares else "keep_batch=True"
        raise ValueError(
            f"a program with {why} has one State, and another one has been committed or resumed: "
            "put all parts into one"
        )


def _sharded(parts: Mapping[str, Part | Shards]) -> str:
    """Return the name of a part that has shards of torch's; "" if there is none."""
    found = (n for n, part in parts.items() if not isinstance(part, Shards) and part.sharded())
    return next(found, "")


def _of_some_ranks(parts: Mapping[str, Part | Shards]) -> str:
    """Return the name of a model in DistributedDataParallel over fewer than all ranks, or ""."""
    for name, part in parts.items():
        group = None if isinstance(part, Shards) else part.group()
        if group is not None and group.size() < world.comm.size:
            return name
    return ""


def refuse_folder(parts: Mapping[str, Part | Shards], folder: Any) -> None:
    """Raise ValueError if there is a folder: what is kept on disk is what all ranks have."""
    if folder is not None and (name := _sharded(parts)):
        raise ValueError(
            f"{name} has a shard on each rank, and folder= keeps what all ranks have: write "
            "checkpoints by torch.distributed.checkpoint"
        )
    if folder is not None and (name := _of_some_ranks(parts)):
        raise ValueError(
            f"{name} is a model of some of the ranks, and folder= keeps what all ranks have: write "
            "checkpoints of your own"
        )


def refuse_another_size(parts: Mapping[str, Part | Shards], before: int, size: int) -> None:
    """Raise ValueError if another number of ranks had committed what not all ranks have."""
    if before != size and (name := _sharded(parts)):
        raise ValueError(
            f"{name} has shards, and {before} ranks had committed them: with {size} ranks load a "
            "checkpoint of torch.distributed.checkpoint"
        )
    if before != size and (name := _of_some_ranks(parts)):
        raise ValueError(
            f"{name} is a model of some of the ranks, and {before} ranks had committed it: {size} "
            "ranks cannot tell which of them has it"
        )


def refuse_fewer(parts: Mapping[str, Part | Shards], before: int, size: int) -> None:
    """Raise StateLostError if ranks are lost with their shards, of so many before."""
    if before != size and (name := _sharded(parts)):
        raise StateLostError(
            f"{name} has a shard on each of {before} ranks, of which {size} are left: start "
            "the job with HPCDIST_SPARES, or load a checkpoint from disk"
        )


def refuse_other_parts(parts: Mapping[str, Part | Shards], found: Any) -> None:
    """Raise ValueError if a commit is of a State with other parts, or others are sharded."""
    own = found.own
    sharded = {name for name, part in parts.items() if isinstance(part, Shards)}
    if (set(own["parts"]), set(own["shards"])) != (set(parts) - sharded, sharded):
        there, here = sorted([*own["parts"], *own["shards"]]), sorted(parts)
        raise ValueError(
            f"the commit of step {found.step} is of a State with the parts {', '.join(there)}, "
            f"and this one has {', '.join(here)}, or others of them are sharded: every start "
            "of a job must resume the same States in the same order"
        )
    kept = own.get("layouts", {})  # earlier versions have none
    for name, layout in layouts_of(parts).items():
        if layout != kept.get(name):
            raise ValueError(
                f"{name} is {layout}, and in the commit of step {found.step} "
                f"{kept.get(name, 'of another version of hpcdist')}: a start that changes a model "
                "needs another folder, or name of the job"
            )


def layouts_of(parts: Mapping[str, Part | Shards]) -> dict[str, str]:
    """Return what a commit for the next start says of the modules and tensors; local."""
    plain = {name: part for name, part in parts.items() if not isinstance(part, Shards)}
    return {name: part.layout() for name, part in plain.items() if part.tensors()}


# -- shards over groups other than the default one -------------------------------------------------


def _of_other_groups(parts: Mapping[str, Part | Shards]) -> str:
    """Name a part whose shards another group has; "" if there is none."""
    found = (n for n, part in parts.items() if isinstance(part, Shards) and not part.of_world)
    return next(found, "")


def refuse_lost(parts: Mapping[str, Part | Shards], rebuild: bool) -> None:
    """Raise ValueError if a recovery would lose the group of shards."""
    name = _of_other_groups(parts)
    if name and not rebuild:
        raise ValueError(
            f"{name}, a ZeroRedundancyOptimizer, is over another group than the default one, which "
            "a recovery loses: give State rebuild=True"
        )


def refuse_kept(parts: Mapping[str, Part | Shards]) -> None:
    """Raise ValueError if commits for the next start of the job cannot have a part's shards."""
    name = _of_other_groups(parts)
    if name:
        raise ValueError(
            f"{name}, a ZeroRedundancyOptimizer, is over another group than the default one: "
            "commits for the next start of the job cannot have its shards"
        )
