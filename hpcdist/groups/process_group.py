"""A group of processes as an object: its members, and the operations among them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from hpcdist.backends import dispatch
from hpcdist.backends.carrier import Carrier
from hpcdist.groups.c10d import C10d
from hpcdist.groups.hooks import WithHooks
from hpcdist.groups.limits import limit_of, seconds_of
from hpcdist.groups.members import Members, short
from hpcdist.groups.reconfigure import Reconfigurable
from hpcdist.groups.window import Window
from hpcdist.groups.world import world

__all__ = ["ProcessGroup"]


class ProcessGroup(C10d, Reconfigurable, WithHooks):
    """Some ranks of the world that communicate with each other.

    Groups come from :func:`hpcdist.new_group` and its relatives, not from the constructor. The
    package's functions take a group as ``group=``. The operations that are methods have torch's
    names and meaning, such as :meth:`allreduce`: they take ranks of this group, and return a
    :class:`Work` at once.

    Parameters
    ----------
    backends : dict
        Device type to the object that moves its data.
    ranks : sequence of int
        World ranks of the members, in group order.
    name : str
        Name, the same on all members and unique to this group.
    description : str
        Text of the user, for messages.
    backend : str
        Name of the backend, as the user gave it.
    config : str
        Backend of each device type, ``"cpu:mpi"``.

    Notes
    -----
    A group owns a communicator until :func:`hpcdist.destroy_process_group`. Of a group over MPI
    that all its members have dropped, a later :func:`hpcdist.new_group` frees it, unless the
    program has asked for the group's name. A group cannot be pickled, because it represents a
    connection of this process.
    """

    __slots__ = (
        "__weakref__",
        "_abort_hooks",
        "_aborted",
        "_backend",
        "_backends",
        "_config",
        "_description",
        "carrier",
        "members",
    )

    def __init__(
        self,
        backends: dict[str, Any],
        ranks: Any,
        name: str,
        description: str,
        backend: str,
        config: str,
    ) -> None:
        self._backends = backends
        # the host's backend, if there is one, serves objects, barriers and host tensors
        self.carrier: Carrier = dispatch.combine(backends)
        self.members = Members(tuple(ranks), name)
        self._description = description
        self._backend = backend
        self._config = config
        self._abort_hooks: dict[int, Callable[[], None]] = {}
        #: The generations in which they have been called.
        self._aborted: set[int] = set()

    def __del__(self, dropped: Callable[[list[Any]], None] = world.drop) -> None:
        if self._backends:
            dropped(list(dict.fromkeys(self._backends.values())))

    def _hold(self) -> None:
        """Let the group live until it is destroyed: it can be reached by other ways."""
        if self in world.groups:
            world.held.add(self)

    def _use(self, comm: Carrier) -> None:
        """Let the group's operations go through another object."""
        self.carrier = comm
        if world.pg is self:
            world.comm = comm

    def rank(self) -> int:
        """This process's rank in the group.

        Returns
        -------
        int
            Between 0 and ``size() - 1``.
        """
        return self.carrier.rank

    def size(self) -> int:
        """Number of ranks in the group.

        Returns
        -------
        int
            At least 1.
        """
        return self.carrier.size

    @property
    def name(self) -> str:
        """Name of the group, the same on all its members."""
        self._hold()  # get_backend_impl() takes names
        return self.members.name

    @property
    def group_name(self) -> str:
        """The same as :attr:`name`, under torch's name for it."""
        return self.name

    @property
    def group_desc(self) -> str:
        """The user's description, or "undefined"."""
        return self._description

    @property
    def timeout(self) -> timedelta:
        """After this long a missing peer is an error. All members must set the same value."""
        return limit_of(self.carrier.timeout)

    @timeout.setter
    def timeout(self, value: timedelta) -> None:
        self.carrier.timeout = seconds_of(value)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set :attr:`timeout`. See :func:`hpcdist.set_timeout`."""
        self.timeout = timeout

    def get_backend(self, device: Any) -> Any:
        """Return the backend that serves a device. See :func:`hpcdist.get_backend_impl`."""
        kind = str(device).partition(":")[0]
        try:
            return self._backends[kind]
        except KeyError:
            served = ", ".join(self._backends) or "nothing: it was destroyed"
            raise ValueError(
                f"no backend of the group {self.members.name!r} serves {kind!r}; it serves {served}"
            ) from None

    def __repr__(self) -> str:
        name, ranks = self.members.name, short(self.members.ranks)
        return f"<ProcessGroup {name!r} backend={self._backend} ranks={ranks}>"

    def __reduce__(self) -> Any:
        raise TypeError(
            f"the process group {self.members.name!r} cannot be pickled or copied: it stands for a "
            "connection of this process. Send its ranks and call new_group on the other side."
        )

    @property
    def supports_window(self) -> bool:
        """Whether :meth:`new_window` works: all ranks are on one node."""
        return bool(dispatch.agreeing(self.carrier).supports_window)

    def new_window(self, tensor: Any = None) -> Window:
        """Make a window: memory of each rank that the others write and read without its help.

        All ranks of the group must call it, in the same order as their other calls.

        Parameters
        ----------
        tensor : torch.Tensor, optional
            Registered with the window; a symmetric tensor of this group, see
            :meth:`Window.tensor_register`. None, on all ranks: register one later.

        Returns
        -------
        Window

        Raises
        ------
        DistBackendError
            If the group has no windows: see :attr:`supports_window`.
        ValueError
            If the group was destroyed.
        ValueError, TypeError, DistError
            As :meth:`Window.tensor_register`.

        Notes
        -----
        Source: ``torch.distributed.ProcessGroup.new_window`` of torch 2.15.
        """
        window = Window(self)
        if tensor is not None:
            window.tensor_register(tensor)
        return window
