"""The backend "hpcdist" of torch.distributed: how its groups are made and matched with ours."""

from __future__ import annotations

import os
import warnings
from datetime import timedelta
from typing import Any
from weakref import WeakValueDictionary

import torch.distributed as dist

from hpcdist import config
from hpcdist._torch_version import explain, untested
from hpcdist.backends.mpi import MPIOptions
from hpcdist.groups import joining
from hpcdist.groups import state as _group
from hpcdist.groups.limits import limit_of
from hpcdist.groups.new_group import new_group
from hpcdist.groups.process_group import ProcessGroup
from hpcdist.groups.resolve import member
from hpcdist.startup import destroy, init, steps
from hpcdist.startup.rendezvous import torchrun
from hpcdist.torch import buckets, modules, places
from hpcdist.torch.process_group import NAME, BridgeGroup
from hpcdist.torch.store import from_torch

#: What torch passes where the program gives no timeout.
_DEFAULTS = (
    dist.distributed_c10d.default_pg_timeout,
    dist.distributed_c10d.default_pg_nccl_timeout,
)

#: Name of one of our groups -> the group that torch has for it.
_bridges: WeakValueDictionary[str, BridgeGroup] = WeakValueDictionary()


def register() -> None:
    """Register the backend with torch.distributed; once is enough."""
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])


def create(options: Any, pg_options: Any = None) -> BridgeGroup:
    """Make the group that torch asks for.

    Its members call it, and no other rank.

    Parameters
    ----------
    options : torch's _DistributedBackendOptions
        Ranks, store, timeout.
    pg_options : MPIOptions, optional
        As for :func:`hpcdist.init_process_group`. Given for the default group, MPI takes CUDA
        tensors too; without them NCCL does, where there is one.

    Raises
    ------
    ValueError
        If torch's ranks are not those of hpcdist's default group, or there is none yet and torch
        asks for a part of the ranks.
    """
    ranks = list(options.global_ranks_in_group)
    warning = untested()
    if warning and options.group_rank == 0:
        warnings.warn(warning, stacklevel=2)
    with explain():
        return _create(options, pg_options, ranks)


def _start(options: Any) -> str:
    """A name for this start of the ranks: torchrun keeps its store when it starts them again."""
    if "TORCHELASTIC_RESTART_COUNT" not in os.environ:
        return "0"
    starts = from_torch(dist.PrefixStore("hpcdist/starts", options.store))
    limit = _limit(options.timeout).total_seconds()
    return torchrun.name_of_start(starts, options.group_rank, options.group_size, limit)


def _create(options: Any, pg_options: Any, ranks: list[int]) -> BridgeGroup:
    if not _group.is_initialized():
        if ranks and ranks != list(range(dist.get_world_size())):
            raise ValueError(
                f"the backend {NAME!r} cannot make the group of ranks {ranks}, because hpcdist is "
                f"not initialised: give {NAME!r} to torch.distributed.init_process_group, or call "
                "hpcdist.init_process_group() on all ranks before it"
            )
        store = None
        if options.group_size > 1 and steps.alone():
            # without an MPI launcher the ranks form one MPI job through the store over which they
            # met
            store = from_torch(dist.PrefixStore(f"hpcdist/{_start(options)}", options.store))
        init.init_process_group(
            # the same as in hpcdist alone: NCCL for CUDA tensors if available, else MPI
            "mpi" if isinstance(pg_options, MPIOptions) else None,
            store=store,
            timeout=_limit(options.timeout),
            rank=options.group_rank,
            world_size=options.group_size,
            pg_options=pg_options,
            enable_reconfigure=getattr(options, "enable_reconfigure", False),  # torch 2.14
        )
        ours = member(None)
        _follow_modules(ours)
        return _bridge(ours, lambda: _destroy(ours), options)
    whole = member(None)
    limit = _limit(options.timeout)
    if not ranks:
        all_ranks = range(options.group_size)
        places.compare(whole, options.store, all_ranks, options.group_rank, limit)
        if _known(whole) is None:
            if options.timeout not in _DEFAULTS:
                whole.timeout = options.timeout
            _follow_modules(whole)
            return _bridge(whole, None, options)
    elif not _is_default(whole):
        # torch's names of groups, which are in the store it passes, may differ between the members
        default = dist.distributed_c10d._get_default_store()
        places.compare(whole, default, ranks, options.group_rank, limit)
    joining.refuse(whole, "new_group")  # torch's groups are not made again
    made = new_group(
        ranks or None,
        timeout=limit,
        pg_options=pg_options,
        sort_ranks=False,  # torch has sorted them, unless the program wants this order
    )
    return _bridge(made, lambda: _destroy(made), options)


def _limit(timeout: timedelta) -> timedelta:
    """Return a group's timeout: ``HPCDIST_TIMEOUT``, where it is set and the program gives none."""
    if timeout not in _DEFAULTS or not config.option("timeout").source(os.environ)[1]:
        return timeout
    return limit_of(config.get("timeout"))


def _is_default(whole: ProcessGroup) -> bool:
    """Whether torch's default group is hpcdist's: then each process has one rank in both."""
    default = dist.group.WORLD
    return isinstance(default, BridgeGroup) and default.ours is whole


def _follow_modules(ours: ProcessGroup) -> None:
    """Note of torch's DDP what a recovery from a death needs, in a job that has some."""
    if ours.supports_reconfigure:
        modules.number()
        buckets.note()


def _known(ours: ProcessGroup) -> BridgeGroup | None:
    """Return torch's group for one of ours; not that of a destroyed group of the same name.

    Nor one that torch has destroyed: whether something still refers to it differs between ranks.
    """
    found = _bridges.get(ours.name)
    return found if found is not None and found.ours is ours and not found.ended else None


def _bridge(ours: Any, release: Any, options: Any = None) -> BridgeGroup:
    bridge = BridgeGroup(ours, release)
    if options is not None:
        bridge.meet_elsewhere(
            _meeting_place(ours, options), options.timeout, list(ours.members.ranks)
        )
    _bridges[ours.name] = bridge
    return bridge


def _meeting_place(ours: ProcessGroup, options: Any) -> Any:
    """Return the store over which the members make backends of torch's own.

    That which torch passes for a group carries torch's name of the group. torch 2.15 counts a group
    made with ``use_local_synchronization`` on its members alone, and names later groups by that
    count, so their members would wait for each other under different names. hpcdist's name of a
    group is the same on all of them.
    """
    if ours is member(None):
        return options.store
    whole = dist.distributed_c10d._get_default_store()
    return dist.PrefixStore(f"hpcdist/{ours.name}", whole)


def _destroy(ours: ProcessGroup) -> None:
    # hpcdist.destroy_process_group() may have been called first
    if ours in _group.world.groups:
        destroy.destroy_process_group(ours)


def group(pg: Any = None) -> Any:
    """Return hpcdist's view of a group of torch.distributed.

    Local to this process.

    Parameters
    ----------
    pg : torch.distributed.ProcessGroup, optional
        A group of the backend "hpcdist"; None means torch's default group.

    Returns
    -------
    hpcdist.ProcessGroup
        The group that moves its data, without a second communicator. For what is no member's group,
        as ``new_group`` returns it on other ranks, hpcdist's ``GroupMember.NON_GROUP_MEMBER``.

    Raises
    ------
    TypeError
        If the group is of another backend.
    """
    if pg is None:
        pg = dist.group.WORLD
        if pg is None:
            raise ValueError("torch.distributed has no default group yet")
    if pg is dist.GroupMember.NON_GROUP_MEMBER:
        return _group.GroupMember.NON_GROUP_MEMBER
    if isinstance(pg, BridgeGroup):
        return pg.ours
    raise TypeError(
        f"{pg!r} is not a group of the backend {NAME!r}; make it with "
        f"torch.distributed.init_process_group({NAME!r}) or new_group(backend={NAME!r})"
    )


def to_torch(ours: Any = None) -> Any:
    """Return torch.distributed's view of a group of hpcdist.

    All members must call it the first time; from then on it is local, until torch destroys
    its view. With the default group it also initialises torch.distributed, where that has not been
    done.

    Parameters
    ----------
    ours : hpcdist.ProcessGroup, optional
        A group this process is a member of; None means hpcdist's default group.

    Returns
    -------
    torch.distributed.ProcessGroup
        Any function of torch.distributed accepts it. There is no second communicator.

    Raises
    ------
    ValueError
        If this process is not a member, or torch.distributed is initialised with another world.
    """
    ours = member(ours)
    known = _known(ours)
    if known is not None:
        return known
    if not dist.is_initialized():
        from hpcdist.torch.rendezvous import init_process_group

        init_process_group(NAME)
    whole = member(None)
    if not _is_default(whole):
        places.compare_members(whole, ours, "to_torch")
    elif ours is whole:
        return dist.group.WORLD
    bridge = _bridge(ours, None)
    _enter(bridge, ours)
    return bridge


def _enter(bridge: BridgeGroup, ours: ProcessGroup) -> None:
    """Register a group in torch's tables, as its new_group does."""
    from torch._C._distributed_c10d import _register_process_group

    books: Any = dist.distributed_c10d._world
    name: Any = f"hpcdist:{ours.name}"
    # hpcdist counts anew when it is started again, while torch keeps its views of what was there
    for former in [pg for pg, used in books.pg_names.items() if used == name]:
        dist.destroy_process_group(former)
    bridge.setGroupName(name)
    books.pg_map[bridge] = (NAME, books.pg_map[dist.group.WORLD][1])
    books.pg_names[bridge] = name
    books.pg_backend_config[bridge] = f"cpu:{NAME},cuda:{NAME}"
    books.pg_group_ranks[bridge] = {world: i for i, world in enumerate(ours.members.ranks)}
    tag = f"user:{name}"
    books.tags_to_pg.setdefault(tag, []).append(bridge)
    books.pg_to_tag[bridge] = tag
    _register_process_group(name, bridge)
