"""The form that torch's ``torchfrtrace`` reads."""

from __future__ import annotations

from typing import Any

from hpcdist._dump_files import dtype_name, dump_of
from hpcdist.operations import TRACED_AS

from .model import Operation, Recording

_STATES = {"queued": "scheduled", "running": "started", "done": "completed", "failed": "started"}


def as_frtrace(recording: Recording, label: str = "gloo") -> dict[str, Any]:
    """Return a recording as torchfrtrace reads it.

    Parameters
    ----------
    recording : Recording
        One rank's.
    label : str
        The backend of torch's that the operations are labelled with: torchfrtrace accepts no other.

    Returns
    -------
    dict
        To be pickled into a file whose name ends in the rank.
    """
    names = _names(recording)
    entries: list[dict[str, Any]] = []
    messages: dict[str, int] = {}
    for operation in recording.operations:
        if operation.group is None or operation.group.uid not in names or operation.starts:
            continue  # the start's numbers come again in the program
        name = names[operation.group.uid]
        messages[name] = messages.get(name, 0) + operation.message
        entries.append(_entry(operation, name, list(names.values()).index(name), messages, label))
    groups = {
        names[group.uid]: {
            "name": names[group.uid],
            "desc": group.name,
            "ranks": str(list(group.ranks)),
        }
        for group in recording.groups
        if group.uid in names
    }
    return dump_of(groups, entries)


def _names(recording: Recording) -> dict[int, str]:
    """The groups' names by their numbers; a name that was used again gets its number added."""
    names: dict[int, str] = {}
    for group in recording.groups:
        if group.ranks:  # a list that is too long is not kept
            taken = group.name in names.values()
            names[group.uid] = f"{group.name}-{group.uid:x}" if taken else group.name
    return names


def _entry(
    operation: Operation, name: str, index: int, messages: dict[str, int], label: str
) -> dict[str, Any]:
    group = operation.group
    assert group is not None
    given, got = _sizes(operation)
    what = TRACED_AS.get(operation.name, TRACED_AS.get(operation.kind, operation.kind))
    if operation.message:
        arrow = "->" if operation.kind == "send" else "<-"
        what = f"{operation.kind} {group.rank}{arrow}{operation.peer}"
    dtype = dtype_name(operation.dtype)
    site = operation.site
    return {
        "record_id": operation.number,
        "pg_id": index,
        "process_group": (name, group.name),
        "collective_seq_id": operation.seq,
        "p2p_seq_id": messages[name],
        "op_id": operation.seq + messages[name],
        "profiling_name": f"{label}:{what}",
        "input_sizes": given,
        "input_dtypes": [dtype] * len(given),
        "output_sizes": got,
        "output_dtypes": [dtype] * len(got),
        "time_created_ns": operation.called,
        "time_discovered_started_ns": operation.started or operation.called,
        "time_discovered_completed_ns": operation.ended,
        "duration_ms": None,
        "state": _STATES.get(operation.state, "scheduled"),
        "retired": operation.state == "done",
        "timeout_ms": 0,
        "is_p2p": operation.message,
        "frames": []
        if site is None
        else [{"name": site.function, "filename": site.file, "line": site.line}],
        "thread_id": "",
        "thread_name": "",
    }


def _sizes(operation: Operation) -> tuple[list[list[int]], list[list[int]]]:
    """Return the shapes of an operation's inputs and outputs; a list counts as one tensor."""
    shape = list(operation.shape) if operation.shape is not None else [operation.elements]
    if not operation.dtype:
        return [[1]], [[1]]
    if operation.kind == "send":
        return [shape], []
    if operation.kind == "recv":
        return [], [shape]
    if operation.kind in ("all_reduce", "broadcast") or not (operation.inputs or operation.outputs):
        return [shape], [shape]
    given, got = operation.inputs, operation.outputs
    if operation.name == "all_gather":
        return [[given]], [[got // max(given, 1), given]]
    return [[given]], [[got]]
