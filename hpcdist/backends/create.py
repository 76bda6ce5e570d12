"""Makes the backends of a group."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from hpcdist import _engine
from hpcdist.backends import cuda
from hpcdist.backends.base import BackendOptions, GroupBackend
from hpcdist.errors import DistBackendError

from . import registry

#: Classes of backends that are known to fit: to look takes longer than all else that makes a group.
_fitting: set[type] = set()


def create(
    config: registry.BackendConfig,
    options: BackendOptions,
    pg_options: Any = None,
    parents: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Make the backends of one group, on its members.

    Parameters
    ----------
    config : BackendConfig
        Which backend serves which device type.
    options : BackendOptions
        The group.
    pg_options : object, optional
        Passed to backends with the extended interface.
    parents : mapping, optional
        Name of a backend to the backend of the group this one is made from.

    Returns
    -------
    dict
        Device type to backend object; one object if a backend serves several devices.

    Raises
    ------
    ValueError
        If no backend of that name is registered.
    DistBackendError
        If the backend is registered but not available in this installation.
    """
    names = config.get_device_backend_map()
    for name in names.values():
        if not registry.is_registered(name):
            raise _missing(name)
    made: dict[str, Any] = {}
    # MPI first: the others may use it to meet
    for name in sorted(
        dict.fromkeys(names.values()), key=lambda name: name != registry.Backend.MPI
    ):
        host, parent = made.get(registry.Backend.MPI), parents.get(name)
        options = replace(options, host=host, parent=parent)
        try:
            made[name] = _made(name, options, pg_options)
        except BaseException:
            for each in made.values():
                each.free()
            raise
    serving = {device: made[name] for device, name in names.items()}
    return _with_devices(serving, names)


def _with_devices(serving: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Let MPI move CUDA tensors too, if it shall and no other backend does.

    On a machine without GPUs a group's operations stay one native call.
    """
    if names.get("cuda", registry.Backend.MPI) != registry.Backend.MPI:
        return serving
    comm = serving.get("cpu") if names.get("cpu") == registry.Backend.MPI else serving.get("cuda")
    if comm is None or ("cuda" not in names and not cuda.may_come()):
        return serving
    from hpcdist.backends.cuda_over_mpi import StagedGroup  # imported only where it is used

    # the host's first: it serves operations without a tensor
    return {"cpu": comm, **serving, "cuda": StagedGroup(comm)}


def renewed(backends: Mapping[str, Any], comm: _engine.Comm) -> dict[str, Any]:
    """Return the same backends over another communicator of MPI.

    Parameters
    ----------
    backends : mapping
        From :func:`create`.
    comm : hpcdist._engine.Comm
        In place of their own.

    Returns
    -------
    dict
        Device type to backend object.

    Raises
    ------
    DistBackendError
        If one of them is neither MPI nor CUDA tensors over MPI.
    """
    made: dict[str, Any] = {}
    for device, backend in backends.items():
        if backend.native is not None:
            made[device] = comm
            continue
        from hpcdist.backends.cuda_over_mpi import StagedGroup  # imported only where it is used

        if not isinstance(backend, StagedGroup):
            raise DistBackendError(
                f"a group whose backend for {device!r} is {type(backend).__name__} cannot be "
                "reconfigured: make it with backend='mpi'"
            )
        made[device] = StagedGroup(comm)
    return made


def _made(name: str, options: BackendOptions, pg_options: Any) -> Any:
    creator, extended = registry.Backend._plugins[name]
    if not extended:
        made = creator(options.store, options.group_rank, options.group_size, options.timeout)
    else:
        # options that name their backend go to that backend alone
        mine = getattr(pg_options, "backend", name) == name
        made = creator(options, pg_options if mine else None)
    try:
        _check_interface(type(made))
    except TypeError:
        if hasattr(made, "free"):
            made.free()
        raise
    return made


def _check_interface(backend: type) -> None:
    """Refuse a class that is no GroupBackend, or whose operations do not accept what its accept.

    Raises
    ------
    TypeError
        Else the first all_gather_object would raise one that does not say what is wrong.
    """
    if backend in _fitting:
        return
    if not issubclass(backend, (GroupBackend, _engine.Comm)):
        raise TypeError(f"{backend.__qualname__} must be a hpcdist.backends.base.GroupBackend")
    for name, ours in vars(GroupBackend).items():
        theirs = getattr(backend, name, None)
        if not _takes_keywords(ours) or theirs is None or _takes_keywords(theirs):
            continue
        raise TypeError(
            f"{backend.__qualname__}.{name} must accept **about, what hpcdist knows about the "
            "call; see hpcdist.backends.base.GroupBackend"
        )
    _fitting.add(backend)


def _takes_keywords(method: Any) -> bool:
    """Whether a method ends in ``**about``; native ones name each keyword."""
    try:
        parameters = inspect.signature(method).parameters
    except (TypeError, ValueError):  # not a function, or one that does not tell
        return False
    return "api" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _missing(name: str) -> Exception:
    usable = ", ".join(sorted(registry.Backend._plugins)) or "none"
    if name in registry.Backend.backend_list and name != registry.Backend.UNDEFINED:
        return DistBackendError(
            f"the backend {name!r} is not available in this installation of hpcdist; usable: "
            f"{usable}. Pass backend='mpi', or omit it: MPI serves CPU and CUDA tensors"
        )
    return ValueError(
        f"there is no backend {name!r}; usable: {usable}. A third party's backend joins with "
        "hpcdist.Backend.register_backend."
    )
