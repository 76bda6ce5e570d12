#!/usr/bin/env python
"""Compare hpcdist's names, parameters and defaults with those of the torch that is installed.

    python tests/conformance/api.py          what api.txt does not explain, or explains needlessly
    python tests/conformance/api.py --all    every difference

A row is one difference: a name of torch that hpcdist lacks, or a parameter that is missing, in
another place or has another default. api.txt names each row (with ``*`` all that begin so), its
reason and, where torch has changed, the versions in which the row holds. Exits with 0 only if
both agree. It needs no rank.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import os
import re
import sys
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from signatures import differing, signature

HERE = Path(__file__).resolve().parent

#: torch's module, and the module of hpcdist that has its names.
MODULES = {
    "torch.distributed": "hpcdist",
    "torch.distributed.distributed_c10d": "hpcdist.distributed_c10d",
    "torch.distributed.device_mesh": "hpcdist.device_mesh",
    "torch.distributed.rendezvous": "hpcdist.rendezvous",
    "torch.distributed.nn": "hpcdist.nn",
    "torch.distributed.nn.functional": "hpcdist.nn.functional",
    "torch.distributed.optim": "hpcdist.optim",
    "torch.distributed.algorithms": "hpcdist.algorithms",
    "torch.distributed.algorithms.join": "hpcdist.algorithms.join",
    "torch.nn.parallel": "hpcdist.parallel",
    "torch.utils.data.distributed": "hpcdist.data",
    **{
        f"torch.distributed.algorithms.{name}": f"hpcdist.algorithms.{name}"
        for name in (
            "ddp_comm_hooks",
            "ddp_comm_hooks.ddp_zero_hook",
            "ddp_comm_hooks.debugging_hooks",
            "ddp_comm_hooks.default_hooks",
            "ddp_comm_hooks.mixed_precision_hooks",
            "ddp_comm_hooks.optimizer_overlap_hooks",
            "ddp_comm_hooks.post_localSGD_hook",
            "ddp_comm_hooks.powerSGD_hook",
            "ddp_comm_hooks.quantization_hooks",
            "model_averaging.averagers",
            "model_averaging.hierarchical_model_averager",
            "model_averaging.utils",
        )
    },
}
#: Names that begin with an underscore and are used all the same.
PRIVATE = {
    "torch.distributed": ("_coalescing_manager", "_CoalescingManager", "_make_nccl_premul_sum"),
    "torch.distributed.distributed_c10d": (
        "_coalescing_manager",
        "_get_default_group",
        "_get_default_store",
        "_get_pg_default_device",
        "_make_nccl_premul_sum",
        "_rank_not_in_group",
    ),
    "DeviceMesh": ("_concatenate", "_flatten", "_unflatten"),
    "DistributedDataParallel": (
        "_get_ddp_logging_data",
        "_register_builtin_comm_hook",
        "_register_fused_optim",
        "_set_ddp_runtime_logging_sample_rate",
        "_set_static_graph",
        "_update_process_group",
    ),
    "Work": ("_source_rank",),
}
#: Members of which every Python class has some.
DUNDERS = ("__init__", "__call__", "__getitem__")


def names(module: Any, path: str) -> list[str]:
    """List the names of a module of torch that a program may use."""
    listed = set(getattr(module, "__all__", ()))
    if not listed:
        for name, value in vars(module).items():
            home = getattr(value, "__module__", None) or ""
            if not name.startswith("_") and not isinstance(value, types.ModuleType):
                own = path == "torch.distributed" or home == path
                if own and home.startswith("torch"):
                    listed.add(name)
    listed |= {name for name in PRIVATE.get(path, ()) if hasattr(module, name)}
    return sorted(listed)


def members(cls: type) -> list[str]:
    """List the members of a class of torch that a program may use."""
    from torch.nn import Module

    inherited = set(dir(Module)) if issubclass(cls, Module) else set()
    public = {
        name
        for name in dir(cls)
        if not name.startswith("_") and not inspect.ismemberdescriptor(getattr(cls, name, None))
    } - inherited
    special = {name for name in (*DUNDERS, *PRIVATE.get(cls.__name__, ())) if hasattr(cls, name)}
    return sorted(public | special)


def has(cls: Any, name: str) -> bool:
    """Whether a class, or its members and instances, have a name."""
    member = next(iter(cls)) if isinstance(cls, enum.EnumMeta) else cls
    fields = getattr(cls, "__dataclass_fields__", ())
    return hasattr(cls, name) or hasattr(member, name) or name in fields


def provides(name: str) -> bool:
    """Whether hpcdist has what a torch, the installed one or another, calls by a dotted name."""
    module = max((path for path in MODULES if name.startswith(f"{path}.")), key=len, default="")
    if not module:
        return False
    holder: Any = importlib.import_module(MODULES[module])
    *outer, last = name[len(module) + 1 :].split(".")
    for part in outer:
        holder = getattr(holder, part, None)
    return has(holder, last)


def compared(path: str, theirs: Any, ours: Any) -> Iterator[str]:
    """Give the rows about one object of torch and its counterpart."""
    if isinstance(theirs, type):
        for name in members(theirs):
            their, our = getattr(theirs, name), getattr(ours, name, None)
            if not has(ours, name):
                yield f"{path}.{name}: missing"
            elif callable(their) and not isinstance(their, type):
                yield from differing(f"{path}.{name}", signature(their), signature(our))
    elif callable(theirs):
        yield from differing(path, signature(theirs), signature(ours))


def rows() -> list[str]:
    """List every difference between the installed torch and hpcdist, each object once."""
    found: list[str] = []
    seen: set[int] = set()
    for path, own in MODULES.items():
        try:
            theirs = importlib.import_module(path)
        except ModuleNotFoundError:
            found.append(f"{path}: not in torch")
            continue
        try:
            ours = importlib.import_module(own)
        except ModuleNotFoundError:
            found.append(f"{path}: missing")
            continue
        for name in names(theirs, path):
            their = getattr(theirs, name)
            if not hasattr(ours, name):
                found.append(f"{path}.{name}: missing")
            elif id(their) not in seen:
                seen.add(id(their))
                found += compared(f"{path}.{name}", their, getattr(ours, name))
    return sorted(set(found))


# --- the table ---------------------------------------------------------------------------------

_ROW = re.compile(
    r"  (\S.*?)(?: \[(?:from (\d+)\.(\d+))?(?: ?until (\d+)\.(\d+))?(?:(?:, )?(with NCCL))?\])?"
)


@dataclass(frozen=True)
class Explained:
    """A row of the table: the builds of torch in which it holds, and its reason."""

    row: str
    since: tuple[int, int]
    until: tuple[int, int]
    nccl: bool
    why: str


def table(text: str) -> list[Explained]:
    """Read a table: a line ``why: ...``, then indented rows, each with builds if not all."""
    found = []
    why = ""
    for number, line in enumerate(text.splitlines(), 1):
        row = _ROW.fullmatch(line)
        if line.startswith("why: "):
            why = line[5:]
        elif row and why:
            since = (int(row[2] or 0), int(row[3] or 0))
            until = (int(row[4] or 9999), int(row[5] or 9999))
            found.append(Explained(row[1], since, until, bool(row[6]), why))
        elif line.strip() and not line.startswith("#"):
            raise ValueError(f"line {number} is neither a reason nor a row: {line!r}")
    return found


def wrong(
    found: list[str], entries: list[Explained], version: tuple[int, int], nccl: bool = False
) -> list[str]:
    """List the rows that no entry explains, and the entries that explain nothing."""
    known = [
        entry.row
        for entry in entries
        if entry.since <= version <= entry.until and (nccl or not entry.nccl)
    ]

    def explains(entry: str, row: str) -> bool:
        return row.startswith(entry[:-1]) if entry.endswith("*") else row == entry

    lines = [
        f"unexplained: {row}" for row in found if not any(explains(entry, row) for entry in known)
    ]
    lines += [
        f"needless: {entry}" for entry in known if not any(explains(entry, row) for row in found)
    ]
    # Rows of other versions are tried too: the newest torch is tested last and seldom.
    missing = (entry.row for entry in entries if entry.row.endswith(": missing"))
    lines += [
        f"needless: {row}"
        for row in missing
        if row not in known and provides(row.removesuffix(": missing"))
    ]
    return lines


def installed() -> tuple[int, int]:
    """Return the version of the installed torch."""
    import torch

    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def has_nccl() -> bool:
    """Return whether the installed torch was built with NCCL."""
    import torch.distributed

    return torch.distributed.is_nccl_available()


def main() -> int:
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # hpcdist's plugin adds names to torch
    warnings.simplefilter("ignore")
    found = rows()
    lines = (
        found
        if "--all" in sys.argv
        else wrong(found, table((HERE / "api.txt").read_text()), installed(), has_nccl())
    )
    print("\n".join(lines))
    print(f"torch {'.'.join(map(str, installed()))}: {len(found)} differences", file=sys.stderr)
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
