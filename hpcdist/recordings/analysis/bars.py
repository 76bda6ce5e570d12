"""The operations as bars of a timeline."""

from __future__ import annotations

from typing import Any

from hpcdist.recordings.model import Operation, Recording

#: Nanoseconds: what an operation takes whose end was not timed, at most.
SHORT = 50_000


def end_of(operation: Operation, after: Operation | None, seen: int) -> int:
    """Return when an operation ended, as far as it is known, in nanoseconds since 1970."""
    if operation.ended is not None:
        return operation.ended
    if not operation.finished:
        return max(seen, operation.called)
    return min(operation.called + SHORT, after.called if after else operation.called + SHORT)


def timeline(recordings: list[Recording]) -> list[dict[str, Any]]:
    """Return a bar for each operation.

    Parameters
    ----------
    recordings : list of Recording
        Of one job.

    Returns
    -------
    list of dict
        Rank, name, text, state, and begin and end in nanoseconds since 1970.
    """
    bars = []
    for recording in recordings:
        following = [*recording.operations[1:], None]
        for operation, after in zip(recording.operations, following, strict=True):
            bars.append(
                {
                    "rank": recording.rank,
                    "name": operation.name,
                    "text": str(operation),
                    "bytes": operation.bytes,
                    "state": operation.failure or operation.state,
                    "begin": operation.called,
                    "agreed": operation.agreed,
                    "end": end_of(operation, after, recording.seen),
                }
            )
    return bars
