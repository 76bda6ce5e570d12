"""A group of processes as an object: its members, and the operations among them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeAlias

from hpcdist.backends import dispatch
from hpcdist.backends.carrier import Carrier
from hpcdist.groups import joining, reconfigure
from hpcdist.groups.c10d import C10d
from hpcdist.groups.hooks import Hooks, PostHookArgs, PreHookArgs
from hpcdist.groups.limits import limit_of, seconds_of
from hpcdist.groups.members import Members, short
from hpcdist.groups.windows.window import Window
from hpcdist.groups.world import world


class ProcessGroup(C10d):
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

    Attributes
    ----------
    members : Members
        Which ranks it has.
    carrier : Carrier
        What its operations go through.
    hooks : Hooks
        What is called around them.

    Notes
    -----
    A group owns a communicator until :func:`hpcdist.destroy_process_group`. Of a group over MPI
    that all its members have dropped, a later :func:`hpcdist.new_group` frees it, unless the
    program has asked for the group's name. A group cannot be pickled, because it represents a
    connection of this process.
    """

    supports_completion_hooks = False

    __slots__ = (
        "__weakref__",
        "_backend",
        "_backends",
        "_config",
        "_description",
        "carrier",
        "hooks",
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
        self.hooks = Hooks()

    def __del__(self, dropped: Callable[[list[Any]], None] = world.drop) -> None:
        if self._backends:
            dropped(list(dict.fromkeys(self._backends.values())))

    def _hold(self) -> None:
        """Let the group live until it is destroyed: it can be reached by other ways."""
        if self in world.groups:
            world.held.add(self)

    def _use(self, comm: Carrier) -> None:
        """Let the group's operations go through another object."""
        if joining.is_closed(self):
            return  # it gets its hooks when this process has joined the others
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
        """Whether :meth:`new_window` works: on one node, or with MPI's ``MPI_THREAD_MULTIPLE``."""
        return bool(dispatch.agreeing(self.carrier).supports_window)

    def new_window(self, tensor: Any = None) -> Window:
        """Make a window: memory of each rank that the others write and read without its help.

        All ranks of the group must call it, in the same order as their other calls.

        Parameters
        ----------
        tensor : torch.Tensor, optional
            Registered with the window: see :meth:`Window.tensor_register`. None, on all ranks:
            register one later.

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

    @property
    def supports_reconfigure(self) -> bool:
        """Whether :meth:`reconfigure` works: in a job that MPI lets go on after a death."""
        return world.pg is self and self.supports_abort_hooks

    @property
    def supports_abort_hooks(self) -> bool:
        """Whether :meth:`register_abort_hook` works: the same."""
        return reconfigure.tolerates_failures(self)

    def get_reconfigure_handle(self) -> str:
        """Return a text that stands for this process in :meth:`reconfigure`.

        Returns
        -------
        str
            Valid until the group is reconfigured.

        Notes
        -----
        Local to this process. Source: ``torch.distributed.ProcessGroup.get_reconfigure_handle`` of
        torch 2.15.
        """
        return reconfigure.handle_of(self)

    def reconfigure(
        self,
        opts: reconfigure.ReconfigureOptions | None = None,
        *,
        timeout: timedelta | None = None,
        rebuild: bool = False,
    ) -> reconfigure.Reconfigured:
        """Let the ranks that live go on, after a :class:`hpcdist.RankFailedError`.

        The group, which must be the default group, keeps its object; its ranks are numbered anew,
        in their former order. Operations in flight fail on all ranks, and all other groups are
        destroyed, as their ranks mean something else now: make them again, or let `rebuild` do so.
        Then operations work.
        All ranks that live must call it, also those that have seen no error yet.

        Parameters
        ----------
        opts : ReconfigureOptions, optional
            Torch's way to name the ranks. All ranks that live take part; others are refused.
        timeout : datetime.timedelta, optional
            Time for the others to call; None means that of `opts`, or the group's.
        rebuild : bool
            Make every other group again from its members that live. It keeps its object, name,
            options and hooks; its ranks are numbered anew. A group that one of its members has
            destroyed or dropped, and one over NCCL, is lost on all. All ranks must give the same.

        Returns
        -------
        Reconfigured
            Which ranks died, and the former ranks of the others.

        Raises
        ------
        ValueError
            If it is not the default group, or the handles are not those of the ranks that live; in
            a job with spares, whose :class:`~hpcdist.elastic.State` does it.
        DistTimeoutError
            If a rank that lives does not call in time; it is named, if it is on this node. All may
            call again.
        DistMismatchError
            On all ranks, if they give different `rebuild`. The default group goes on, and all
            others are lost.
        DistBackendError
            If the job ends when a rank dies: see ``HPCDIST_FT``.

        Notes
        -----
        If another rank dies while groups are made again, all ranks repeat the recovery inside this
        call. If a signal handler raises, :meth:`get_reconfigure_handle` tells whether to call
        again: it gives another text once the group is reconfigured.
        Source: ``torch.distributed.ProcessGroup.reconfigure`` of torch 2.15, over a new rendezvous;
        here MPI knows who lives (``MPIX_Comm_shrink``).
        """
        joining.refuse_by_hand()
        options = opts or reconfigure.ReconfigureOptions()
        options = replace(options, rebuild=rebuild or options.rebuild)
        return reconfigure.reconfigure(self, options, timeout)

    def register_pre_hook(self, hook_id: int, hook: Callable[[PreHookArgs], None]) -> None:
        """Call a function before each operation of this group begins on this rank.

        Local; ranks may have different hooks. Operations that hpcdist makes itself count, such as
        the all-reduces of DistributedDataParallel; ``monitored_barrier``, windows and
        ``hpcdist.empty`` do not. An ``Exception`` in a hook is also raised on
        the other ranks. After ``KeyboardInterrupt`` and other exceptions that are none, the call
        has not been made: the others wait for it, and this rank may make it again.

        Parameters
        ----------
        hook_id : int
            A number for :meth:`unregister_pre_hook`, not in use yet.
        hook : callable
            Takes a :class:`~hpcdist.groups.hooks.PreHookArgs`.

        Raises
        ------
        ValueError
            If a hook of this number is registered, or the group was destroyed.

        Notes
        -----
        Source: ``torch.distributed.ProcessGroup.register_pre_hook`` of torch 2.15.
        """
        self._hook("pre", hook_id, hook)

    def register_post_hook(self, hook_id: int, hook: Callable[[PostHookArgs], None]) -> None:
        """Call a function after each operation of this group has begun on this rank.

        Local; an operation that is not asynchronous has ended by then.

        Parameters
        ----------
        hook_id : int
            A number for :meth:`unregister_post_hook`, not in use yet.
        hook : callable
            Takes a :class:`~hpcdist.groups.hooks.PostHookArgs`.

        Notes
        -----
        Errors as in :meth:`register_pre_hook`. Source:
        ``torch.distributed.ProcessGroup.register_post_hook`` of torch 2.15.
        """
        self._hook("post", hook_id, hook)

    def unregister_pre_hook(self, hook_id: int) -> None:
        """Remove a hook; a number that is not in use raises ValueError.

        Parameters
        ----------
        hook_id : int
            The number of :meth:`register_pre_hook`.
        """
        self._unhook("pre", hook_id)

    def unregister_post_hook(self, hook_id: int) -> None:
        """Remove a hook; a number that is not in use raises ValueError.

        Parameters
        ----------
        hook_id : int
            The number of :meth:`register_post_hook`.
        """
        self._unhook("post", hook_id)

    def register_abort_hook(self, hook_id: int, hook: Callable[[], None]) -> None:
        """Call a function before :meth:`reconfigure` ends the group's operations on this rank.

        Local; for what the program has to put in order before the ranks go on. An exception in it
        is logged, and does not stop the others.

        Parameters
        ----------
        hook_id : int
            A number for :meth:`unregister_abort_hook`, not in use yet.
        hook : callable
            Takes nothing.

        Raises
        ------
        DistBackendError
            If the job ends when a rank dies (``supports_abort_hooks`` is False): native code does
            that, which calls no Python.

        Notes
        -----
        Source: ``torch.distributed.ProcessGroup.register_abort_hook`` of torch 2.15.
        """
        reconfigure.refuse_abort_hooks(self)
        self.hooks.aborting.add(hook_id, hook)
        self._hold()  # reconfigure() calls it

    def unregister_abort_hook(self, hook_id: int) -> None:
        """Remove a hook; a number that is not in use raises ValueError.

        Parameters
        ----------
        hook_id : int
            The number of :meth:`register_abort_hook`.
        """
        self.hooks.remove_abort(hook_id)

    def _hook(self, kind: str, hook_id: int, hook: Callable[..., None]) -> None:
        if not self._backends and self not in world.kept:
            raise ValueError(f"the process group {self.members.name!r} has been destroyed")
        with self.hooks.changing:
            self.hooks.add(kind, hook_id, hook)
            if self._backends:
                self._use(self.hooks.carry(self._backends))

    def _unhook(self, kind: str, hook_id: int) -> None:
        with self.hooks.changing:
            self.hooks.remove(kind, hook_id, self.members.name)
            if self._backends:
                self._use(self.hooks.carry(self._backends))


#: An argument ``group=``; None means the default group.
Group: TypeAlias = ProcessGroup | None
