"""HPCDIST_TAKE_OVER: hpcdist serves the backends that it names, in programs that do not know it.

The program finds what it asked for in ``get_backend()``, because libraries branch on it, and what
serves in ``get_backend_config()``. Three things change: the function through which every group is
made, the handler of ``env://``, and the backend for CPU tensors where none is named. The names that
torch calls private are checked first, so that a torch without them is an error and not a job that
runs on something else.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import multiprocessing
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

VARIABLE = "HPCDIST_TAKE_OVER"
OURS = "hpcdist"
#: Backends that hpcdist can stand for.
KNOWN = ("gloo", "mpi")

_noted = False


def names() -> tuple[str, ...]:
    """Return the backends that the variable names; none if it is not set.

    Local to this process.

    Returns
    -------
    tuple of str
        In lower case.

    Raises
    ------
    ValueError
        If it names another backend, or is set and names none.
    """
    text = os.environ.get(VARIABLE, "")
    found = tuple(part.strip().lower() for part in text.split(",") if part.strip())
    wrong = [name for name in found if name not in KNOWN]
    if text and not found:
        raise ValueError(f"{VARIABLE}={text!r} names no backend: it takes gloo, mpi or gloo,mpi")
    if wrong:
        raise ValueError(
            f"{VARIABLE}={text!r}: hpcdist cannot take over {wrong[0]!r}, only "
            + " and ".join(KNOWN)
        )
    return found


def install(taken: tuple[str, ...]) -> None:
    """Let hpcdist serve backends of torch in this process.

    Local to this process; every process of a job does it, by the same variable.

    Parameters
    ----------
    taken : tuple of str
        Their names.

    Raises
    ------
    RuntimeError
        If this torch has not what that takes.
    """
    c10d: Any = dist.distributed_c10d
    handlers = _handlers()
    missing = [
        name
        for name in ("_new_process_group_helper", "_world", "_MPI_AVAILABLE", "BackendConfig")
        if not hasattr(c10d, name)
    ]
    if handlers is None or "env" not in handlers:
        missing.append("rendezvous._rendezvous_handlers")
    if not hasattr(dist.Backend, "default_device_backend_map"):
        missing.append("Backend.default_device_backend_map")
    if missing or handlers is None:
        raise RuntimeError(
            f"{VARIABLE} needs names of torch.distributed that torch {torch.__version__} has not: "
            f"{', '.join(missing)}. Unset it and start the group by hpcdist.torch."
            "init_process_group(), or install a torch of docs/torch.md"
        )
    if getattr(c10d._new_process_group_helper, "takes_over", False):
        return
    c10d._new_process_group_helper = _serving(c10d._new_process_group_helper, taken)
    handlers["env"] = _meeting(handlers["env"])
    if "gloo" in taken:
        dist.Backend.default_device_backend_map["cpu"] = OURS
    if "mpi" in taken:
        c10d._MPI_AVAILABLE = True
    _export_place()


def _handlers() -> dict[str, Any] | None:
    from torch.distributed import rendezvous

    return getattr(sys.modules[rendezvous.__module__], "_rendezvous_handlers", None)


def replaced(backend: str, taken: tuple[str, ...]) -> str:
    """Return a backend's text with hpcdist in place of those that are taken over."""
    parts = [part.rpartition(":") for part in backend.split(",")]
    return ",".join(
        f"{device}{colon}{OURS if name.strip() in taken else name}" for device, colon, name in parts
    )


def _serving(make: Any, taken: tuple[str, ...]) -> Any:
    """Wrap torch's function that makes every group."""

    @functools.wraps(make)
    def helper(
        size: int, rank: int, ranks: Any, backend: str, store: Any, *rest: Any, **named: Any
    ) -> Any:
        asked = str(backend)
        used = replaced(asked, taken)
        if asked == "undefined":  # torch takes the default of the machine's kind of device
            served = dist.distributed_c10d.BackendConfig(dist.Backend(asked))
            if OURS not in served.get_device_backend_map().values():
                return make(size, rank, ranks, backend, store, *rest, **named)
        elif used == asked:
            return make(size, rank, ranks, backend, store, *rest, **named)
        if size == -1:  # torch's MPI has ranks of its own, and no store
            known = _launchers().ENVIRONMENT.detect(os.environ)
            meeting = dist.rendezvous("env://" if known else "mpi://", timeout=named["timeout"])
            store, rank, size = next(iter(meeting))
        group, prefixed = make(size, rank, ranks, dist.Backend(used), store, *rest, **named)
        books: Any = dist.distributed_c10d._world
        if group in books.pg_map:
            books.pg_map[group] = (backend, books.pg_map[group][1])
        if not ranks:
            _note(asked, rank)
        return group, prefixed

    helper.takes_over = True  # type: ignore[attr-defined]
    return helper


def _note(asked: str, rank: int) -> None:
    """Say once per job that it runs over hpcdist."""
    global _noted
    if rank == 0 and not _noted:
        _noted = True
        what = "no backend" if asked == "undefined" else f"backend {asked!r}"
        print(
            f"hpcdist: {what} was asked for, and {VARIABLE}={os.environ.get(VARIABLE, '')} lets "
            "hpcdist serve it",
            file=sys.stderr,
            flush=True,
        )


def _meeting(before: Any) -> Any:
    """Wrap torch's handler of env://: the ranks of an MPI launcher meet over MPI."""

    def handler(url: str, **arguments: Any) -> Iterator[tuple[Any, int, int]]:
        launcher = _launchers().find()
        if launcher is None or not launcher.mpi:
            yield from before(url, **arguments)
            return
        import hpcdist.torch
        from hpcdist.startup.rendezvous.urls import stated

        claimed = stated(url)
        for store, *place in hpcdist.torch.rendezvous.meet("mpi://", **arguments):
            # what the program states goes on to hpcdist's own start, where a contradiction to MPI
            # is an error on all ranks
            rank, size = (b if a == -1 else a for a, b in zip(claimed, place, strict=True))
            yield store, rank, size

    return handler


def _launchers() -> Any:
    """Return hpcdist.launchers, without hpcdist, whose import loads libmpi."""
    found = sys.modules.get("hpcdist.launchers") or sys.modules.get(f"{__package__}.launchers")
    if found is not None:
        return found
    spec = importlib.util.find_spec(OURS)
    assert spec is not None and spec.origin is not None
    path = Path(spec.origin).parent / "launchers" / "rank.py"
    loader = importlib.util.spec_from_file_location(f"{__package__}.rank", path)
    assert loader is not None and loader.loader is not None
    module = importlib.util.module_from_spec(loader)
    loader.loader.exec_module(module)
    return module.launchers(f"{__package__}.launchers")


def _export_place() -> None:
    """Set RANK and the like, for a program that reads them before it starts its group."""
    package = _launchers()
    launcher = package.find()
    if launcher is not None and launcher.mpi:
        if multiprocessing.parent_process() is None:
            launch = _without_spares(launcher.read(os.environ))
            package.variables.export_launch(launch, os.environ)
            return
        # a rank started this process: what the program set for it stays
        known = dict(os.environ)
        package.variables.export_launch(launcher.read(known), known)
        os.environ.update({n: value for n, value in known.items() if n not in os.environ})


def _without_spares(launch: Any) -> Any:
    """Return a place in the job in which the spares do not count; one has a number behind all."""
    text = os.environ.get("HPCDIST_SPARES", "")
    spares = int(text) if text.isdecimal() else 0
    if not spares or launch.size is None or spares >= launch.size:
        return launch
    size = launch.size - spares
    return dataclasses.replace(launch, size=size, local_size=size if launch.nodes == 1 else None)
