"""The variables that torchrun sets, for programs under other launchers: RANK, LOCAL_RANK, ...

``rank.py`` and torch's plugin load this package without the rest of hpcdist, so it imports only its
neighbours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping

from .base import Launch

#: A process's place in its job.
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
#: Where rank 0 can be reached.
MASTER = ("MASTER_ADDR", "MASTER_PORT")
#: The variable that lists which of them hpcdist has set, and to what: "RANK=1,WORLD_SIZE=4". A job
#: that is started inside another one inherits all of them, and replaces those.
EXPORTED = "HPCDIST_EXPORTED"
#: Names of launchers that may be srun, with a plugin that it does not name.
_ANY_MANAGER = ("a PMIx process manager", "a PMI process manager")


def of_launch(
    launch: Launch, environ: Mapping[str, str], *, in_blocks: bool = False
) -> dict[str, str]:
    """Return the variables for a process, as far as its launcher's variables lead to them.

    Parameters
    ----------
    launch : Launch
        Its place in the job.
    environ : mapping
        The environment.
    in_blocks : bool
        Whether the ranks of each node follow each other, and all nodes have the same number.

    Returns
    -------
    dict
        Name to value. MASTER_ADDR is missing where the job may have several nodes, NODE_RANK
        where it is not known which one this is, MASTER_PORT always.
    """
    # another launcher's processes see the step that started it, or its daemon on their node
    slurm, task = launch.launcher.startswith("srun"), environ.get("SLURM_PROCID")
    by_slurm = slurm or (launch.launcher in _ANY_MANAGER and task == str(launch.rank))
    node = None
    if launch.nodes == 1:
        node = 0
    elif (
        by_slurm
        and environ.get("SLURM_NODEID", "").isdecimal()
        and "SLURM_STEP_NUM_TASKS" in environ
    ):
        node = int(environ["SLURM_NODEID"])
    elif in_blocks and launch.rank is not None and launch.local_size:
        node = launch.rank // launch.local_size
    numbers = (launch.rank, launch.size, launch.local_rank, launch.local_size, node)
    found = {n: str(v) for n, v in zip(PLACE, numbers, strict=True) if v is not None}
    host = first_host(environ.get("SLURM_STEP_NODELIST", "")) if by_slurm else ""
    if launch.nodes == 1:
        host = "127.0.0.1"
    return {**found, **({"MASTER_ADDR": host} if host else {})}


def first_host(nodes: str) -> str:
    """Return the first of Slurm's list of nodes: ``n03`` of ``n[03-05,9],m1``."""
    # the comma that ends the first entry is outside brackets
    (entry,) = re.findall(r"^(?:\[[^]]*\]|[^,\[])*", nodes)
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", entry)


def exported(environ: Mapping[str, str]) -> set[str]:
    """Return the names of the variables that hpcdist has set and nobody has changed since."""
    pairs = (entry.partition("=") for entry in environ.get(EXPORTED, "").split(","))
    return {name for name, _, value in pairs if name and environ.get(name) == value}


def export(values: Mapping[str, str], environ: MutableMapping[str, str]) -> dict[str, str]:
    """Set the variables that are not set, and those that belong to another job.

    Parameters
    ----------
    values : mapping
        Name to value.
    environ : mutable mapping
        The environment that is changed. A variable that someone else has set stays as it is. If
        RANK or WORLD_SIZE contradict `values`, they are wrong, and so are the others that say which
        process this is.

    Returns
    -------
    dict
        Name to the former value of those that were wrong.
    """
    ours = exported(environ)
    wrong = any(
        environ.get(name, "") not in ("", values[name])
        for name in ("RANK", "WORLD_SIZE")
        if name in values and name not in ours
    )
    replaced = {}
    for name, value in values.items():
        there = environ.get(name, "")
        if there and name not in ours and not (wrong and name in PLACE):
            continue
        if there not in ("", value) and name not in ours:
            replaced[name] = there
        environ[name] = value
        ours.add(name)
    if wrong:  # the local ones, where nobody says them
        for name in PLACE:
            if name not in values and name in environ and name not in ours:
                replaced[name] = environ.pop(name)
    environ[EXPORTED] = ",".join(f"{name}={environ[name]}" for name in sorted(ours))
    return replaced


def export_launch(
    launch: Launch, environ: MutableMapping[str, str], *, in_blocks: bool = False
) -> dict[str, str]:
    """Set a process's variables as :func:`export` does, from its place in the job.

    Parameters
    ----------
    launch, in_blocks
        As for :func:`of_launch`.
    environ : mutable mapping
        The environment that is read and changed.

    Returns
    -------
    dict
        Name to the former value of those that were wrong.
    """
    return export(of_launch(launch, environ, in_blocks=in_blocks), environ)
