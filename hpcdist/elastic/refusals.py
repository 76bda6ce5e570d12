"""What a State with shards of torch's (FSDP2) cannot do, and says so on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcdist.elastic.commit import Commit
from hpcdist.elastic.parts import Part
from hpcdist.elastic.shards import Shards, StateLostError


def _sharded(parts: Mapping[str, Part | Shards]) -> str:
    """Return the name of a part that has shards of torch's; "" if there is none."""
    found = (n for n, part in parts.items() if not isinstance(part, Shards) and part.sharded())
    return next(found, "")


def refuse_folder(parts: Mapping[str, Part | Shards], folder: Any) -> None:
    """Raise ValueError if there is a folder: what is kept on disk is what all ranks have."""
    if folder is not None and (name := _sharded(parts)):
        raise ValueError(
            f"{name} has a shard on each rank, and folder= keeps what all ranks have: write "
            "checkpoints by torch.distributed.checkpoint"
        )


def refuse_another_size(parts: Mapping[str, Part | Shards], before: int, size: int) -> None:
    """Raise ValueError if another number of ranks had committed shards."""
    if before != size and (name := _sharded(parts)):
        raise ValueError(
            f"{name} has shards, and {before} ranks had committed them: with {size} ranks load a "
            "checkpoint of torch.distributed.checkpoint"
        )


def refuse_fewer(parts: Mapping[str, Part | Shards], commit: Commit | None, size: int) -> None:
    """Raise StateLostError if ranks are lost with their shards of a commit."""
    if commit is not None and commit.size != size and (name := _sharded(parts)):
        raise StateLostError(
            f"{name} has a shard on each of {commit.size} ranks, of which {size} are left: start "
            "the job with HPCDIST_SPARES, or load a checkpoint from disk"
        )
