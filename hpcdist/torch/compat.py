"""The differences between the supported versions of torch, in one place.

torch calls a Python process group by the names of its methods, and renames them now and then. The
group has every operation under its newest name; the other names stand here, each with the versions
that call it. Facts from torch's sources of those versions; docs/support.md says on which the bridge
was run.
"""

from __future__ import annotations

from types import FunctionType, ModuleType
from typing import NamedTuple

from hpcdist._torch_version import OLDEST, untested, version
from hpcdist.operations import OPERATIONS


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
    *(
        Renamed(about.c10d, about.c10d_before, "to 2.12")
        for about in OPERATIONS.values()
        if about.c10d_before
    ),
    Renamed("all_gather_single_coalesced", "allgather_into_tensor_coalesced", "to 2.12"),
    Renamed("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "to 2.12"),
    Renamed("_start_coalescing", "start_coalescing", "from 2.14 on"),
    Renamed("_end_coalescing", "end_coalescing", "from 2.14 on"),
    Renamed("gather_single", "gather_into_tensor", "from 2.14 on"),
    Renamed("_get_backend", "get_backend", "from 2.14 on"),
    Renamed("setGroupName", "_set_group_name", "all, from Python"),
    Renamed("setGroupDesc", "_set_group_desc", "all, from Python"),
    Renamed("set_timeout", "_set_default_timeout", "all, from Python"),
    Renamed("split_group", "splitGroup", "all, from C++"),
)


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


def recorded_as() -> str:
    """Return the backend under whose name torchfrtrace reads operations over MPI.

    Local to this process. Before 2.12 it accepts GPU backends only.
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
    try:
        from torch._C._dynamo import eval_frame

        action = eval_frame._FrameAction.SKIP
        skip = eval_frame._FrameExecStrategy(action, action)
        set_strategy = eval_frame.set_code_exec_strategy
    except (ImportError, AttributeError):
        if not untested():
            raise
        return  # programs that do not compile run without it
    for found in vars(module).values():
        if isinstance(found, type) and found.__module__ == module.__name__:
            members = list(vars(found).values())
        else:
            members = [found]
        for member in members:
            function = member.fget if isinstance(member, property) else member
            while isinstance(function, FunctionType) and function.__module__ == module.__name__:
                set_strategy(function.__code__, skip)
                function = getattr(function, "__wrapped__", None)
