"""The differences between the supported versions of torch, in one place.

torch calls a Python process group by the names of its methods, and renames them now and then. The
group has every operation under its newest name; the other names stand here, each with the versions
that call it. Facts from torch's sources of those versions; docs/support.md says on which the bridge
was run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import NamedTuple

from hpcdist.errors import DistError

__all__ = [
    "NAMES",
    "NEWEST",
    "OLDEST",
    "Renamed",
    "check",
    "explain",
    "hide_from_compiler",
    "recorded_as",
    "untested",
    "version",
]

#: The oldest torch that is taken, and the newest that hpcdist was run with.
OLDEST = (2, 10)
NEWEST = (2, 15)


class Renamed(NamedTuple):
    """A method of process groups that has another name in other versions.

    Parameters
    ----------
    ours : str
        Its name in this package.
    other : str
        Its other name.
    versions : str
        The versions of torch that use that name.
    """

    ours: str
    other: str
    versions: str


#: Methods under the names that they have in other versions than 2.13, and for other callers.
NAMES = (
    Renamed("all_gather_single", "_allgather_base", "to 2.12"),
    Renamed("reduce_scatter_single", "_reduce_scatter_base", "to 2.12"),
    Renamed("all_gather_single_coalesced", "allgather_into_tensor_coalesced", "to 2.12"),
    Renamed("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "to 2.12"),
    Renamed("all_to_all_single", "alltoall_base", "to 2.12"),
    Renamed("_start_coalescing", "start_coalescing", "from 2.14 on"),
    Renamed("_end_coalescing", "end_coalescing", "from 2.14 on"),
    Renamed("gather_single", "gather_into_tensor", "from 2.14 on"),
    Renamed("_get_backend", "get_backend", "from 2.14 on"),
    Renamed("setGroupName", "_set_group_name", "all, from Python"),
    Renamed("setGroupDesc", "_set_group_desc", "all, from Python"),
    Renamed("set_timeout", "_set_default_timeout", "all, from Python"),
    Renamed("split_group", "splitGroup", "all, from C++"),
)


def version(text: str | None = None) -> tuple[int, int]:
    """Major and minor number of torch.

    Local to this process.

    Parameters
    ----------
    text : str, optional
        For example ``"2.13.0+cpu"``; by default that of the torch which is imported.

    Returns
    -------
    tuple of int
    """
    if text is None:
        import torch

        text = str(torch.__version__)
    major, minor = text.split("+")[0].split(".")[:2]
    return int(major), int("".join(c for c in minor if c.isdigit()))


def check(text: str | None = None) -> None:
    """Raise for a torch that is too old.

    Local to this process.

    Parameters
    ----------
    text : str, optional
        As for :func:`version`.

    Raises
    ------
    ImportError
        If it is older than `OLDEST`.
    """
    found = version(text)
    if found < OLDEST:
        raise ImportError(
            f"hpcdist.torch needs torch {OLDEST[0]}.{OLDEST[1]} or newer, and this is "
            f"{found[0]}.{found[1]}; hpcdist itself works with it (import hpcdist)"
        )


def untested() -> str:
    """Return a warning if torch is newer than what hpcdist was tested with.

    Local to this process.

    Returns
    -------
    str
        A sentence; empty if it is not.
    """
    found = version()
    if found <= NEWEST:
        return ""
    return (
        f"hpcdist.torch was tested with torch {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}, "
        f"and this is {found[0]}.{found[1]}: install one of those (pip install "
        f'"torch<{NEWEST[0]}.{NEWEST[1] + 1}"), or look for a newer hpcdist'
    )


@contextlib.contextmanager
def explain() -> Iterator[None]:
    """Context manager: an error of a torch that is too new names that version.

    Local to this process. Errors of hpcdist's own, and of wrong arguments, pass as they are.

    Raises
    ------
    RuntimeError
        In place of what torch raised, which is its cause.
    """
    try:
        yield
    except (DistError, ValueError):
        raise
    except Exception as error:
        text = untested()
        if not text:
            raise
        raise RuntimeError(f"{text}. What failed: {type(error).__name__}: {error}") from error


def recorded_as() -> str:
    """Return the backend under whose name torchfrtrace reads operations over MPI.

    Local to this process. Before 2.12 it accepts GPU backends only.

    Returns
    -------
    str
    """
    return "gloo" if version() >= (2, 12) else "xccl"


def hide_from_compiler(module: ModuleType) -> None:
    """Keep torch.compile from compiling a module's functions and methods.

    Local to this process. C++ calls a group's methods while a compiled program runs, and the
    compiler would treat them as part of it, and fail at what it does not support. This costs
    nothing in programs that do not compile: ``torch.compiler.disable`` would import the compiler.

    Parameters
    ----------
    module : module
        Its own functions, and those of its classes.
    """
    from torch._C._dynamo import eval_frame

    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    for found in vars(module).values():
        if isinstance(found, type) and found.__module__ == module.__name__:
            members = list(vars(found).values())
        else:
            members = [found]
        for member in members:
            function = member.fget if isinstance(member, property) else member
            while isinstance(function, FunctionType) and function.__module__ == module.__name__:
                eval_frame.set_code_exec_strategy(function.__code__, skip)
                function = getattr(function, "__wrapped__", None)
