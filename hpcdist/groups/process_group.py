"""A group of processes as an object: its members, and the operations among them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from hpcdist._engine import Work
from hpcdist.backends import dispatch
from hpcdist.backends.carrier import Carrier
from hpcdist.groups.c10d import LowLevel
from hpcdist.groups.hooks import WithHooks
from hpcdist.groups.limits import limit_of, seconds_of
from hpcdist.groups.methods import Collectives
from hpcdist.groups.numbers import whole
from hpcdist.groups.reconfigure import Reconfigurable
from hpcdist.groups.window import Window
from hpcdist.groups.world import world

__all__ = ["ProcessGroup"]


def short(ranks: tuple[int, ...]) -> str:
    """Return the ranks as one line of text, whatever their number."""
    if len(ranks) <= 16:
        return str(list(ranks))
    first, last = (", ".join(map(str, part)) for part in (ranks[:8], ranks[-4:]))
    return f"[{first}, ... {last}] ({len(ranks)} ranks)"


class ProcessGroup(Collectives, LowLevel, Reconfigurable, WithHooks):
    """Some ranks of the world that communicate with each other.

    Groups come from :func:`hpcdist.new_group` and its relatives, not from the constructor. The
    methods are the package's functions in object style and take ranks of this group; the functions
    take a group and, where documented, ranks of the world.

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
        "_generation",
        "_index",
        "_name",
        "_ranks",
        "carrier",
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
        self._ranks = tuple(ranks)
        self._index = {world: place for place, world in enumerate(self._ranks)}
        self._name = name
        self._description = description
        self._backend = backend
        self._config = config
        #: How often it was reconfigured: what depends on its ranks compares this.
        self._generation = 0
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
        return self._name

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
                f"no backend of the group {self._name!r} serves {kind!r}; it serves {served}"
            ) from None

    def __repr__(self) -> str:
        return f"<ProcessGroup {self._name!r} backend={self._backend} ranks={short(self._ranks)}>"

    def __reduce__(self) -> Any:
        raise TypeError(
            f"the process group {self._name!r} cannot be pickled or copied: it stands for a "
            "connection of this process. Send its ranks and call new_group on the other side."
        )

    def _check_rank(self, rank: int, what: str) -> int:
        """Return a rank in the group, or raise ValueError."""
        rank = whole(rank, what)
        if 0 <= rank < self.carrier.size:
            return rank
        raise ValueError(
            f"{what}={rank} is outside the group {self._name!r} of size {self.carrier.size}: ranks "
            f"in it are 0 to {self.carrier.size - 1}"
        )

    def _check_peer(self, rank: int, what: str) -> int:
        """Return a rank in the group other than this one, or raise ValueError."""
        rank = whole(rank, what)
        if rank == self.carrier.rank:
            kind = "isend" if what.endswith("dst") else "irecv"
            raise ValueError(
                f"{what}={rank} is this process itself, in the group {self._name!r}: it would wait "
                f"for itself for ever. Use {kind}, or copy the tensor."
            )
        return self._check_rank(rank, what)

    def _peer(self, rank: int | None, group_rank: int | None, what: str) -> int:
        """The same as :meth:`_place`, for a rank that must not be this one."""
        return self._check_peer(self._place(rank, group_rank, what), what)

    def _place(self, rank: int | None, group_rank: int | None, what: str) -> int:
        """Return the group rank that `dst` (a world rank) or `group_dst` names; one is required."""
        if group_rank is not None:
            if rank is not None:
                raise ValueError(
                    f"give either {what} (a rank of the world) or group_{what} (a rank of the "
                    f"group), not both: got {what}={rank}, group_{what}={group_rank}"
                )
            return self._check_rank(group_rank, "group_" + what)
        if rank is None:
            raise ValueError(f"{what} (a rank of the world) or group_{what} must be given")
        rank = whole(rank, what)
        try:
            return self._index[rank]
        except KeyError:
            raise ValueError(
                f"{what}={rank} is not in the group {self._name!r} of size {self.carrier.size}, "
                f"whose ranks of the world are {short(self._ranks)}"
            ) from None

    def _root(
        self, api: str, tensor: Any, rank: int | None, group_rank: int | None, what: str
    ) -> int:
        """The same as :meth:`_place` for a collective: the other ranks receive the error too."""
        try:
            return self._place(rank, group_rank, what)
        except Exception as error:
            dispatch.agreeing(self.carrier, tensor).refuse(error, api=api)
            raise

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

    def isend(self, tensor: Any, group_dst: int, tag: int = 0) -> Work:
        """Begin to send to one rank.

        The peer must receive. See :func:`hpcdist.isend`.
        """
        return self.carrier.isend(tensor, self._check_rank(group_dst, "group_dst"), tag)

    def irecv(self, tensor: Any, group_src: int | None = None, tag: int = 0) -> Work:
        """Begin to receive from one rank, or from any.

        The peer must send. See :func:`hpcdist.irecv`.
        """
        source = -1 if group_src is None else self._check_rank(group_src, "group_src")
        return self.carrier.irecv(tensor, source, tag)

    def send(self, tensor: Any, group_dst: int, tag: int = 0) -> None:
        """Send to one rank and wait until `tensor` may be changed.

        The peer must receive. See :func:`hpcdist.send`.
        """
        self.carrier.send(tensor, self._check_peer(group_dst, "group_dst"), tag)

    def recv(self, tensor: Any, group_src: int | None = None, tag: int = 0) -> int:
        """Receive from one rank, or from any, and wait.

        The peer must send. See :func:`hpcdist.recv`.
        """
        source = -1 if group_src is None else self._check_peer(group_src, "group_src")
        return self.carrier.recv(tensor, source, tag)
