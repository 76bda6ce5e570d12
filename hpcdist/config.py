"""Every setting of hpcdist: its name, type, default and meaning.

A setting is read from the environment variable ``HPCDIST_<NAME>`` at the moment it is needed, so a
program may set ``os.environ`` before :func:`hpcdist.init_process_group`. Nothing here writes to the
environment. This module is a leaf: it imports neither torch nor MPI.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Any

from hpcdist._device_options import DEVICE_OPTIONS
from hpcdist._option import Option
from hpcdist._store_options import STORE_OPTIONS

__all__ = ["Option", "describe", "faults", "get", "option", "options", "register", "unread"]

#: Seconds that a group waits for a missing peer, unless the program or a setting says otherwise.
DEFAULT_TIMEOUT = 1800.0

_PREFIX = "HPCDIST_"
#: What is read elsewhere: by the build, and by the loader before there are settings.
_OTHERS = ("HPCDIST_MPI", "HPCDIST_MPICC", "HPCDIST_MPICC_ALL")

_OPTIONS: dict[str, Option] = {}


def register(new: Option) -> Option:
    """Add a setting, so that :func:`get` finds it and :func:`describe` lists it.

    Parameters
    ----------
    new : Option
        The setting; its name must be free.

    Returns
    -------
    Option
        The same object.

    Raises
    ------
    ValueError
        If a setting of that name exists.
    """
    if new.name in _OPTIONS:
        raise ValueError(f"the setting {new.name!r} exists already")
    _OPTIONS[new.name] = new
    return new


def option(name: str) -> Option:
    """Look a setting up by its short name.

    Parameters
    ----------
    name : str
        For example ``"check"``.

    Returns
    -------
    Option
        Its type, default and meaning.

    Raises
    ------
    KeyError
        If there is none of that name.
    """
    try:
        return _OPTIONS[name]
    except KeyError:
        known = ", ".join(sorted(_OPTIONS))
        raise KeyError(f"hpcdist has no setting {name!r}; it has: {known}") from None


def options() -> tuple[Option, ...]:
    """All settings, by name.

    Returns
    -------
    tuple of Option
        Sorted by name.
    """
    return tuple(_OPTIONS[name] for name in sorted(_OPTIONS))


def get(name: str, environ: Mapping[str, str] | None = None) -> Any:
    """Value of a setting: from its environment variable, else its default.

    Parameters
    ----------
    name : str
        Short name, for example ``"timeout"``.
    environ : mapping, optional
        Read instead of ``os.environ``.

    Returns
    -------
    object
        The value, of the setting's kind.

    Raises
    ------
    KeyError
        If there is no such setting.
    ValueError
        If the variable holds something else than the setting accepts.
    """
    found = option(name)
    variable, text = found.source(os.environ if environ is None else environ)
    return found.parse(text, variable) if text else found.default


def faults(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """What is wrong with the variables that settings are read from.

    Parameters
    ----------
    environ : mapping, optional
        Read instead of ``os.environ``.

    Returns
    -------
    dict of str to str
        For each variable that holds something else than its setting accepts, the error's text.
    """
    env = os.environ if environ is None else environ
    found = {}
    for item in options():
        variable, text = item.source(env)
        try:
            if text:
                item.parse(text, variable)
        except ValueError as error:
            found[variable] = str(error)
    return found


def unread(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables that look like settings, and that nothing reads: misspelt ones mostly.

    Parameters
    ----------
    environ : mapping, optional
        Read instead of ``os.environ``.

    Returns
    -------
    dict of str to str
        For each, the most similar name of a setting, or empty.
    """
    env = os.environ if environ is None else environ
    known = {item.variable.removeprefix(_PREFIX): item.variable for item in options()}
    found = {}
    for variable in sorted(env):
        name = variable.removeprefix(_PREFIX)
        ours = variable in _OTHERS or name == variable or name.startswith("TEST_")
        if name not in known and not ours:
            near = difflib.get_close_matches(name, known, 1)
            found[variable] = known[near[0]] if near else ""
    return found


def describe(environ: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """List every setting with its present value, for diagnosis.

    Parameters
    ----------
    environ : mapping, optional
        Read instead of ``os.environ``.

    Returns
    -------
    list of dict
        Keys ``variable``, ``value``, ``default``, ``is_set`` and ``doc``. A value that cannot be
        read is given as the text of its error.
    """
    env = os.environ if environ is None else environ
    rows = []
    for item in options():
        try:
            value = get(item.name, env)
        except ValueError as error:
            value = str(error)
        if item.secret:
            value = "(not shown)" if item.source(env)[1] else ""
        rows.append(
            {
                "variable": item.variable,
                "value": value,
                "default": item.default,
                "is_set": bool(item.source(env)[1]),
                "doc": item.doc,
            }
        )
    return rows


_GENERAL_OPTIONS = (
    Option(
        "check",
        "choice",
        "on",
        "Entry check of collectives: before data moves, the ranks compare what they called. "
        "'off' leaves it out, 'on' compares operation, dtype, count, layout, reduce-op and root, "
        "'fast' does so too, but a short call between nodes may end on some ranks although another "
        "one gives it up, and then the group is over; 'full' compares more and costs more.",
        choices=("off", "fast", "on", "full"),
    ),
    Option(
        "nan_check",
        "bool",
        False,
        "Look for NaNs in what this rank gives to the others. A collective then raises "
        "DistNaNError on all ranks before data moves, with the rank, the element and the line; a "
        "message raises on each end that looks. It costs one pass over the data. Tensors that NCCL "
        "moves are not looked at. Ranks may differ in it. Read when the default group is made.",
    ),
    Option(
        "timeout",
        "seconds",
        DEFAULT_TIMEOUT,
        "Seconds after which a peer that does not come is an error, where no timeout is given to "
        "init_process_group or new_group.",
        minimum=0.001,
    ),
    Option(
        "debug",
        "choice",
        "",
        "Debug level: off, info (log what groups are made) or detail (also the entry check 'full' "
        "in groups made from then on). Unset: TORCH_DISTRIBUTED_DEBUG decides.",
        choices=("off", "info", "detail"),
    ),
    Option(
        "log",
        "choice",
        "",
        "Level of hpcdist's own log on stderr, each line with its rank: debug, info, warning or "
        "error. Unset leaves the level and the handlers to the program's logging.",
        choices=("debug", "info", "warning", "error"),
    ),
    Option(
        "take_over",
        "str",
        "",
        "Backends of torch.distributed that hpcdist serves in programs that do not know it: gloo, "
        "mpi or gloo,mpi. torch reads it at its import. Give it to all ranks.",
    ),
    Option(
        "exported",
        "str",
        "",
        "Not for users: which of RANK, LOCAL_RANK, MASTER_ADDR and the like hpcdist has set, and a "
        "job inside this one may replace.",
    ),
    Option(
        "ft",
        "bool",
        False,
        "Go on without ranks that die: their peers raise RankFailedError and call "
        "ProcessGroup.reconfigure. Needs an MPI with fault tolerance, started with it: Open MPI 5 "
        "under 'mpirun --with-ft ulfm'; with another one init_process_group warns. Give it to all "
        "ranks.",
    ),
    Option(
        "spares",
        "int",
        0,
        "How many of the job's processes, the last ones, wait in init_process_group until a rank "
        "dies, and then take its number and its committed state. Needs HPCDIST_FT=1, an MPI with "
        "fault tolerance, and hpcdist.elastic. Give it to all ranks.",
        maximum=10**6,
    ),
    Option(
        "commit_job",
        "str",
        "",
        "Name under which hpcdist.elastic keeps this job's commits in the memory of its nodes, so "
        "that the next start under the same name goes on from them. Set by 'python -m hpcdist "
        "launch --max-restarts'; torchrun's restarts need none.",
    ),
    Option(
        "check_transport",
        "choice",
        "auto",
        "What carries the entry check: 'auto' takes memory shared by the node where all ranks are "
        "on one, and MPI elsewhere; 'mpi' takes MPI always. Read by the native engine when a group "
        "is made; give it to all ranks.",
        choices=("auto", "mpi"),
    ),
    Option(
        "two_level",
        "choice",
        "auto",
        "Between nodes with several ranks, all_reduce, reduce, reduce_scatter, broadcast and "
        "all_gather go through the memory of each node first, so that each byte crosses the "
        "network once for a node: 'auto' from the sizes on from which that was measured to be no "
        "slower than one call of MPI's after the entry check, 'on' from 32 KiB, 'off' never. Read "
        "by the native engine when the default group is made, or one of a communicator; give it "
        "to all ranks.",
        choices=("auto", "off", "on"),
    ),
    Option(
        "deterministic",
        "choice",
        "off",
        "What the bits of floating-point sums in host memory may not depend on, beyond what they "
        "never do: 'layout' makes them the same wherever the ranks are, on one node or on many, "
        "for the same inputs and number of ranks. Read by the native engine when the default "
        "group is made, or one of a communicator; give it to all ranks.",
        choices=("off", "layout"),
    ),
    Option(
        "nodes",
        "str",
        "",
        "For tests and measurements: the ranks of a machine behave as on so many nodes, in blocks, "
        "each with memory of its own; MPI carries what goes between them. Or the node of each of "
        "the job's ranks, as in 0,0,1. Read by the native engine when MPI is started; give it to "
        "all ranks.",
    ),
    Option(
        "node_memory",
        "bytes",
        16 << 20,
        "Memory in /dev/shm that the ranks of a group on one node share, for its collectives; "
        "taken at the first long one, at most that much for each group. The least value of the "
        "ranks counts. 0, or where there is no room for it: they go through MPI.",
        maximum=1 << 50,
    ),
    Option(
        "recorder",
        "int",
        1024,
        "Operations that the flight recorder of each process keeps, rounded up to a power of two. "
        "0 switches it off. Read when MPI is started.",
        minimum=0,
        maximum=1 << 24,
    ),
    Option(
        "dump",
        "str",
        "",
        "Folder into which each rank writes its flight recorder when an operation fails and when "
        "the job is aborted, for 'python -m hpcdist analyze'. It is made if it is not there. "
        "Read when MPI is started.",
    ),
    Option(
        "hang_report",
        "bool",
        True,
        "Write what all ranks of the node do, with their stacks, to standard error when an "
        "operation times out and on SIGUSR2. 0 leaves it out, and the signals alone. Read when MPI "
        "is started.",
    ),
    Option(
        "straggler",
        "share",
        0.25,
        "Warn once per node if one rank makes this one wait in collectives for more than this "
        "share of the time. 0 switches it off. Read when MPI is started.",
    ),
    Option(
        "straggler_window",
        "seconds",
        60.0,
        "Seconds over which that share is taken. Read when MPI is started.",
        minimum=0.5,
    ),
    Option(
        "debug_token",
        "str",
        "",
        "Token of the debug server where start_debug_server is given none. Unset: a new one each "
        "time.",
        secret=True,
    ),
    Option(
        "simd",
        "choice",
        "auto",
        "Instruction set of the reduction kernels. Read by the native engine at the first "
        "reduction; one that this processor or build lacks counts as auto.",
        choices=("auto", "avx512", "avx2", "neon", "scalar"),
    ),
)
for _option in (*_GENERAL_OPTIONS, *DEVICE_OPTIONS, *STORE_OPTIONS):
    register(_option)
