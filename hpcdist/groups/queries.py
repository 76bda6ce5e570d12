"""Queries about groups, backends and this process's ranks, without communication."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from hpcdist import _nccl_loader, launchers
from hpcdist.backends import registry
from hpcdist.backends.registry import Backend, BackendConfig
from hpcdist.groups import state as _group
from hpcdist.groups.resolve import member
from hpcdist.groups.state import ProcessGroup

if TYPE_CHECKING:
    import torch


def is_available() -> bool:
    """Return whether hpcdist can communicate here.

    Returns
    -------
    bool
        True: without its native modules the package does not import.

    Notes
    -----
    Local to this process. Source: ``torch.distributed.is_available``.
    """
    return True


def is_backend_available(backend: str) -> bool:
    """Return whether a backend can be had here.

    Parameters
    ----------
    backend : str
        A name, or ``"device:backend,device:backend"``, where all must be available.

    Returns
    -------
    bool
        True if :func:`hpcdist.init_process_group` accepts it.

    Raises
    ------
    ValueError
        If the text is malformed.

    Notes
    -----
    Local to this process. Source: ``torch.distributed.is_backend_available``.
    """
    if ":" in backend:
        names = BackendConfig(backend).get_device_backend_map().values()
        return all(_usable(name) for name in names)
    return _usable(Backend(backend))


def _usable(name: str) -> bool:
    """Whether a backend can be made here; NCCL needs its library."""
    return registry.is_registered(name) and (name != Backend.NCCL or _nccl_loader.is_available())


def is_mpi_available() -> bool:
    """Return whether the MPI backend can be had here.

    Returns
    -------
    bool
        True when the native engine is built, which importing hpcdist requires.

    Notes
    -----
    Local to this process. Source: ``torch.distributed.is_mpi_available``.
    """
    return registry.is_registered(Backend.MPI)


def is_nccl_available() -> bool:
    """Return whether the NCCL backend can be had here.

    Returns
    -------
    bool
        True when a libnccl.so.2 of version 2.18 or newer can be loaded; asking loads it.

    Notes
    -----
    Local to this process. Source: ``torch.distributed.is_nccl_available``.
    """
    return _usable(Backend.NCCL)


def is_gloo_available() -> bool:
    """Return whether a Gloo backend can be had here.

    Returns
    -------
    bool
        False, unless a third party registered one: hpcdist does not use Gloo.

    Notes
    -----
    Local to this process. Source: ``torch.distributed.is_gloo_available``.
    """
    return registry.is_registered(Backend.GLOO)


def is_ucc_available() -> bool:
    """Return whether a UCC backend can be had here.

    Returns
    -------
    bool
        False, unless a third party registered one: MPI uses UCC internally.

    Notes
    -----
    Local to this process. Source: ``torch.distributed.is_ucc_available``.
    """
    return registry.is_registered(Backend.UCC)


def is_xccl_available() -> bool:
    """Return whether an XCCL backend can be had here.

    Returns
    -------
    bool
        False, unless a third party registered one.

    Notes
    -----
    Local to this process. Source: ``torch.distributed.is_xccl_available``.
    """
    return registry.is_registered(Backend.XCCL)


def is_torchelastic_launched() -> bool:
    """Return whether torchrun started this process.

    Returns
    -------
    bool
        True if the variable TORCHELASTIC_RUN_ID is set.

    Notes
    -----
    Local to this process. Source: ``torch.distributed.is_torchelastic_launched``.
    """
    return "TORCHELASTIC_RUN_ID" in os.environ


def get_default_backend_for_device(device: torch.device | str) -> str:
    """Return the name of the backend that serves a device by default.

    Parameters
    ----------
    device : torch.device or str
        For example ``"cpu"`` or ``"cuda:1"``.

    Returns
    -------
    str
        Lower-case name.

    Raises
    ------
    ValueError
        If no backend serves that type of device.

    Notes
    -----
    Local to this process. Source: ``torch.distributed.get_default_backend_for_device``.
    """
    kind = str(device).partition(":")[0].lower()
    try:
        return Backend.default_device_backend_map[kind]
    except KeyError:
        known = ", ".join(sorted(Backend.default_device_backend_map))
        raise ValueError(f"no default backend for device {device!r}; known: {known}") from None


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """Return the rank of this process among those of its node.

    Parameters
    ----------
    fallback_rank : int, optional
        Result when neither MPI nor a launcher knows.

    Returns
    -------
    int
        From MPI once the default group exists, before that from the launcher's variables or
        LOCAL_RANK.

    Raises
    ------
    RuntimeError
        If neither MPI nor a launcher knows and there is no `fallback_rank`.

    Notes
    -----
    Local to this process. Source: ``torch.distributed.get_node_local_rank``.
    """
    if _group.is_initialized():
        return _group.world.comm.local_rank
    launch = launchers.detect()
    if launch is not None and launch.local_rank is not None:
        return launch.local_rank
    if os.environ.get("LOCAL_RANK"):
        return int(os.environ["LOCAL_RANK"])
    if fallback_rank is not None:
        return int(fallback_rank)
    raise RuntimeError(
        "the node-local rank is not known: no launcher's variables are set. Call "
        "init_process_group first, or pass fallback_rank."
    )


def supports_complex(reduceOp: Any) -> bool:
    """Return whether a reduction is defined for complex numbers.

    Parameters
    ----------
    reduceOp : ReduceOp
        The reduction.

    Returns
    -------
    bool
        True for SUM, AVG and PREMUL_SUM.

    Notes
    -----
    Local to this process. Source: ``torch.distributed.supports_complex``.
    """
    return reduceOp.name in ("SUM", "AVG", "PREMUL_SUM")


def get_backend(group: ProcessGroup | None = None) -> str:
    """Return the name of a group's backend.

    Parameters
    ----------
    group : ProcessGroup, optional
        A group this process is in; None means the default group.

    Returns
    -------
    str
        Lower case, as requested: ``"mpi"``, or ``"cpu:mpi,cuda:nccl"``.

    Raises
    ------
    ValueError
        If this process is not in the group.

    Notes
    -----
    Local to this process. Source: ``torch.distributed.get_backend``.
    """
    return member(group)._backend


def get_backend_config(group: ProcessGroup | None = None) -> str:
    """Return the backend of each device type in a group.

    Parameters
    ----------
    group : ProcessGroup, optional
        A group this process is in; None means the default group.

    Returns
    -------
    str
        For example ``"cpu:mpi"``.

    Raises
    ------
    ValueError
        If this process is not in the group.

    Notes
    -----
    Local to this process. Source: ``torch.distributed.get_backend_config``.
    """
    return member(group)._config


def get_backend_impl(
    group: str | ProcessGroup | None = None, device: torch.device | str | None = None
) -> Any:
    """Return the object that moves a group's data.

    Parameters
    ----------
    group : ProcessGroup or str, optional
        A group this process is in, or its name; None means the default group.
    device : torch.device or str, optional
        The device whose tensors it moves; may be omitted if one backend serves all devices.

    Returns
    -------
    object
        A :class:`~hpcdist.backends.base.GroupBackend`; of MPI's, the native communicator. What
        it offers beside that interface can change with any version.

    Raises
    ------
    ValueError
        If there is no such group, no backend serves the device, or several could be meant.

    Notes
    -----
    Local to this process. Source: ``torch.distributed.get_backend_impl`` of torch 2.15.
    """
    if isinstance(group, str):
        found = [each for each in _group.world.groups if each.members.name == group]
        if not found:
            known = ", ".join(repr(each.members.name) for each in _group.world.groups)
            raise ValueError(f"this process is in no group named {group!r}; its groups: {known}")
        group = found[0]
    pg = member(group)
    if device is not None:
        return pg.get_backend(device)
    backends = list(dict.fromkeys(pg._backends.values()))
    if len(backends) > 1:
        raise ValueError(
            f"the group {pg.members.name!r} has a backend for each of {', '.join(pg._backends)}: "
            "name the device"
        )
    return backends[0]


def get_pg_count() -> int:
    """Return the number of groups this process is in.

    Returns
    -------
    int
        The default group counts; destroyed groups do not.

    Notes
    -----
    Local to this process. Source: ``torch.distributed.get_pg_count``, which counts the groups ever
    made.
    """
    return len(_group.world.groups)
