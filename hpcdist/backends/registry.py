"""The names of backends, the functions that make them, and the devices they serve."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

from hpcdist import log

_log = log.get_logger("backends")
_logged = False


class Plugin(NamedTuple):
    """How a backend is made: its function, and whether that takes the extended arguments."""

    creator_fn: Callable[..., Any]
    extended_api: bool


class Backend(str):
    """Enum-like class of backend names.

    The values are lower-case strings, reachable as attributes (``Backend.MPI``). Calling the class
    parses a name: ``Backend("MPI") == "mpi"``. An unregistered name is only converted to lower
    case; :func:`hpcdist.init_process_group` refuses it.

    Parameters
    ----------
    name : str
        A backend's name in any case, or ``"device:backend,device:backend"``.

    Returns
    -------
    str
        The name in lower case.

    Raises
    ------
    ValueError
        If the name is not a string.

    Notes
    -----
    Local to this process. Source: ``torch.distributed.Backend``; GLOO, UCC and XCCL are names only.
    """

    __slots__ = ()

    UNDEFINED = "undefined"
    GLOO = "gloo"
    NCCL = "nccl"
    UCC = "ucc"
    MPI = "mpi"
    XCCL = "xccl"

    backend_list: ClassVar[list[str]] = [UNDEFINED, GLOO, NCCL, XCCL, UCC, MPI]
    default_device_backend_map: ClassVar[dict[str, str]] = {"cpu": MPI, "cuda": NCCL}
    backend_capability: ClassVar[dict[str, list[str]]] = {MPI: ["cpu"], NCCL: ["cuda"]}
    _plugins: ClassVar[dict[str, Plugin]] = {}

    def __new__(cls, name: str) -> Backend:
        if not isinstance(name, str):
            raise ValueError(f"a backend's name must be a str, not {type(name).__name__}")
        return name.lower()  # type: ignore[return-value]

    @classmethod
    def register_backend(
        cls,
        name: str,
        func: Callable[..., Any],
        extended_api: bool = False,
        devices: str | Sequence[str] | None = None,
    ) -> None:
        """Register a third party's backend under a name.

        Local to this process; every rank that uses the backend must register it.

        Parameters
        ----------
        name : str
            Name for :func:`hpcdist.init_process_group`.
        func : callable
            Makes one group's backend, a :class:`hpcdist.backends.base.GroupBackend`.
            Called as ``func(store, rank, world_size, timeout)``, or with the extended interface as
            ``func(options, pg_options)``, where the options are a
            :class:`hpcdist.backends.base.BackendOptions`.
        extended_api : bool
            Use the extended interface.
        devices : str or sequence of str, optional
            Device types it serves, for example ``"cpu"``; None means ``cpu`` and ``cuda``, with a
            warning.

        Raises
        ------
        TypeError
            If ``func`` cannot be called.
        ValueError
            If a working backend has the name already.

        Notes
        -----
        Source: ``torch.distributed.Backend.register_backend``.
        """
        if not callable(func):
            raise TypeError(f"func must be callable, not {type(func).__name__}")
        key = cls(name)
        if key in cls._plugins:
            raise ValueError(f"the backend {key!r} is registered already")
        if devices is None:
            warnings.warn(
                f"the devices of backend {key!r} were not given: assuming cpu and cuda. Pass "
                "devices= to register_backend.",
                stacklevel=2,
            )
            served = ["cpu", "cuda"]
        else:
            served = [devices] if isinstance(devices, str) else list(devices)
            for device in served:
                cls.default_device_backend_map.setdefault(device, key)
        if not hasattr(cls, name.upper()):
            setattr(cls, name.upper(), key)
        if key not in cls.backend_list:
            cls.backend_list.append(key)
        cls.backend_capability[key] = served
        cls._plugins[key] = Plugin(func, extended_api)


class BackendConfig:
    """Which backend serves which device type.

    Parameters
    ----------
    backend : str
        ``"mpi"``: one backend for every device it can serve; ``"cpu:mpi,cuda:nccl"``: one for each
        device type named.

    Raises
    ------
    ValueError
        If the text is malformed, or names a device twice.

    Notes
    -----
    Local to this process. Source: ``torch.distributed.BackendConfig``.
    """

    def __init__(self, backend: str) -> None:
        text = Backend(backend)
        self.device_backend_map: dict[str, str] = {}
        if ":" not in text:
            devices = Backend.backend_capability.get(text, ["cpu"])
            self.device_backend_map = dict.fromkeys(devices, text)
            return
        for pair in text.split(","):
            device, colon, name = (part.strip() for part in pair.partition(":"))
            if not (device and colon and name) or ":" in name:
                raise ValueError(
                    f"backend {backend!r}: {pair!r} is not of the form device:backend; an example "
                    "is 'cpu:mpi,cuda:nccl'"
                )
            if device in self.device_backend_map:
                raise ValueError(f"backend {backend!r} names the device {device!r} twice")
            self.device_backend_map[device] = name

    def get_device_backend_map(self) -> dict[str, str]:
        """Return the backend of each device type.

        Returns
        -------
        dict
            Device type to backend name, both lower case.
        """
        return self.device_backend_map

    def __repr__(self) -> str:
        return ",".join(f"{device}:{name}" for device, name in self.device_backend_map.items())


def plugin(name: str) -> Plugin | None:
    """Find how a backend is made; None if the name is not registered."""
    return Backend._plugins.get(name)


def substitute(backend: str) -> str:
    """Put ``mpi`` where a script for torch asks for ``gloo``: it serves the same devices here.

    Parameters
    ----------
    backend : str
        A name, or ``"device:backend,device:backend"``, in lower case.

    Returns
    -------
    str
        The same with ``mpi`` for ``gloo``, unless a backend is registered under that name.
    """
    if is_registered(Backend.GLOO):
        return backend
    return re.sub(rf"(^|:\s*){Backend.GLOO}(?=\s*(,|$))", rf"\g<1>{Backend.MPI}", backend)


def log_substitute(asked: str, used: str, rank: int) -> None:
    """Log once per job, on rank 0 of the world, that another backend serves than the one named."""
    global _logged
    if asked == used or rank or _logged:
        return
    _logged = True
    _log.warning(
        "backend %r was asked for; hpcdist has no gloo and uses %r. Pass backend=%r to silence "
        "this warning.",
        asked,
        used,
        used,
    )


def is_registered(name: str) -> bool:
    """Return whether a backend of this name can be made in this process."""
    return name in Backend._plugins
