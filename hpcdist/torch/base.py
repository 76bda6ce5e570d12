"""The bridge's process group without its operations: who it is, its end, how a call runs."""

# torch's stubs describe the overloads of its C++ class; its trampolines pass lists and options.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch.distributed import ProcessGroup, Work

from hpcdist._buffer import limit as call_limit
from hpcdist._buffer import limited
from hpcdist._engine import ASYNC_HERE
from hpcdist.backends.cuda_over_mpi import StagedGroup
from hpcdist.backends.dispatch import agreeing, serving
from hpcdist.backends.refusal import refusing_parts
from hpcdist.errors import DistTimeoutError
from hpcdist.flight_recorder import Entry, Where, recorder
from hpcdist.groups import joining
from hpcdist.groups import state as _group
from hpcdist.groups.new_group import checked, new_group
from hpcdist.groups.world import Absent
from hpcdist.operations import TRACED_AS
from hpcdist.torch.arguments import begun
from hpcdist.torch.compat import recorded_as
from hpcdist.torch.delegate import give_delegate
from hpcdist.torch.elsewhere import Elsewhere
from hpcdist.torch.functional import keep_for_graphs
from hpcdist.torch.hooks import after, before
from hpcdist.torch.ranges import shown
from hpcdist.torch.timeouts import asks_to_set_it, settable
from hpcdist.torch.window import BridgeWindow
from hpcdist.torch.work import AllOf, BridgeWork, FinishedWork, ReconfiguredWork, limit_of

#: Name of the backend.
NAME = "hpcdist"

#: What torchfrtrace is told that its operations ran over.
RECORDED_AS = recorded_as()

#: Seconds that an abort waits for operations in flight.
_SOON = 0.001

#: What a synchronous call gives back: torch's functions only wait for it.
_DONE = FinishedWork([])


def _free(group: Any) -> None:
    """Destroy a group, unless hpcdist.destroy_process_group() has come first."""
    if group in _group.world.groups:
        _group.remove(group)


def _refuse(what: str, instead: str) -> Any:
    def method(self: Any, *args: Any, **arguments: Any) -> NoReturn:
        raise NotImplementedError(f"groups of the backend 'hpcdist' {what}: {instead}")

    return method


_no_growth = _refuse(
    "do not grow",
    "start the job with all its ranks, and make groups of them by torch.distributed.new_group",
)
_no_completion_hook = _refuse(
    "call no hooks when an operation completes",
    "use the futures of its Work; torch.profiler and hpcdist.torch.dump_flight_recorder show the "
    "operations",
)


class BridgeBase(ProcessGroup):
    """The part of a :class:`BridgeGroup` without its operations."""

    supports_abort_hooks = True
    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = _supports_time_estimate = False  # the second one: torch 2.15
    supports_completion_hooks = False

    def __init__(self, group: Any, release: Callable[[], None] | None = None) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self.ours = group
        self._place = group.rank(), group.size()
        self._release = release
        self.ended = False  # whether torch has destroyed it
        self._name = group.name
        self._description = group.group_desc
        self._coalesced: list[Work] | None = None
        self._recorder = recorder()
        self._parts: list[BridgeBase] = []
        self._elsewhere: Elsewhere | None = None
        self._messages: StagedGroup | None = None
        self.renewal: Any = None  # of what torch keeps of it, after a reconfiguration
        self.noted: list[Any] | None = None  # where what it broadcasts is to be noted
        self._delegate = give_delegate(self)

    def meet_elsewhere(self, store: Any, timeout: timedelta, ranks: list[int]) -> None:
        """Set where the members meet for other backends, if the user named some."""
        if self._elsewhere is not None:
            self._elsewhere.end("abort")
        self._elsewhere = Elsewhere(self, store, timeout, ranks, NAME)

    # --- what it refuses: torch's own errors are about backends in C++ ---------------------------

    merge_remote_group = mergeRemoteGroup = _no_growth
    _register_on_completion_hook = _no_completion_hook

    # --- who it is -------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        return NAME

    @property
    def _carrier(self) -> Any:
        # asked each time: a group that is reconfigured gets another one
        return self.ours.carrier

    @property
    def _gone(self) -> bool:
        """Whether hpcdist has destroyed the group, or lost it when the world was reconfigured."""
        return isinstance(self._carrier, Absent)

    def _where(self) -> tuple[int, int]:
        """Rank and size; of a group that is gone the last ones, for which torch's C++ asks."""
        if not self._gone:
            self._place = int(self._carrier.rank), int(self._carrier.size)
        return self._place

    def getRank(self) -> int:
        return self._where()[0]

    def getSize(self) -> int:
        return self._where()[1]

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    group_name = property(getGroupName)

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    group_desc = property(getGroupDesc)

    def __repr__(self) -> str:
        return f"<hpcdist.torch.BridgeGroup {self._name!r} of {self.ours!r}>"

    @property
    def _device_types(self) -> list[torch.device]:
        others = self._elsewhere.names if self._elsewhere is not None else {}
        kinds = dict.fromkeys([*self.ours._backends, *others])
        return [torch.device(kind) for kind in kinds] or [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        if asks_to_set_it():
            return settable(self)
        device = torch.device(device)
        if self._elsewhere is None or not self._elsewhere.has(device):
            return self
        return self._elsewhere.group_for(device)._get_backend(device)

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False  # FSDP2 asks the backend; it allocates by itself then

    def _has_hooks(self) -> bool:
        return False

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return int(self._carrier.seq)

    def set_timeout(self, timeout: timedelta) -> None:
        self.ours.timeout = timeout
        if self._elsewhere is not None:
            self._elsewhere.set_timeout(timeout)

    # --- windows and hooks -----------------------------------------------------------------------

    @property
    def supports_window(self) -> bool:
        """Whether :meth:`new_window` works: on one node, or with MPI's ``MPI_THREAD_MULTIPLE``."""
        return not self._gone and bool(self.ours.supports_window)

    def new_window(self, tensor: torch.Tensor | None = None) -> BridgeWindow:
        """Make a window: see :meth:`hpcdist.ProcessGroup.new_window`. All ranks must call it.

        Parameters
        ----------
        tensor : torch.Tensor, optional
            Registered with the window; best made by ``hpcdist.empty`` in that group.
        """
        window = BridgeWindow(self.ours)
        if tensor is not None:
            window.tensor_register(tensor)
        return window

    def register_pre_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
        """Call a function before each operation: see hpcdist's method of this name."""
        self.ours.register_pre_hook(hook_id, before(hook))

    def register_post_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
        """Call a function when an operation has begun: see hpcdist's method of this name."""
        self.ours.register_post_hook(hook_id, after(hook))

    def unregister_pre_hook(self, hook_id: int) -> None:
        """Remove a hook; a number that is not in use is ignored, as torch ignores it."""
        with contextlib.suppress(ValueError):
            self.ours.unregister_pre_hook(hook_id)

    def unregister_post_hook(self, hook_id: int) -> None:
        """Remove a hook; a number that is not in use is ignored, as torch ignores it."""
        with contextlib.suppress(ValueError):
            self.ours.unregister_post_hook(hook_id)

    # --- after the death of ranks ----------------------------------------------------------------

    @property
    def supports_reconfigure(self) -> bool:
        """Whether :meth:`reconfigure` works: the default group of a job that goes on."""
        return bool(self.ours.supports_reconfigure)

    def get_reconfigure_handle(self) -> str:
        """Return a text that stands for this process in :meth:`reconfigure`."""
        return str(self.ours.get_reconfigure_handle())

    def reconfigure(self, opts: Any = None, *, timeout: timedelta | None = None) -> Work:
        """Let the ranks that live go on: see :meth:`hpcdist.ProcessGroup.reconfigure`.

        torch's default group keeps its object; it destroys all others, and opens a new store on
        rank 0. All ranks that live must call it.

        Parameters
        ----------
        opts : torch's ReconfigureOptions, optional
            No handles mean all ranks that live.
        timeout : datetime.timedelta, optional
            Time for the others to call.

        Returns
        -------
        Work
            Finished. Its ``lost`` are the ranks that died, its ``ranks`` the former ranks of the
            others, by their new ones.
        """
        return ReconfiguredWork(self.ours.reconfigure(opts, timeout=timeout))

    # --- its end ---------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Free what was made for torch; hpcdist's own groups stay."""
        self.ended = True
        self._end_others("shutdown")
        release, self._release = self._release, None
        if release is not None:
            release()

    def abort(self) -> None:
        """Free what was made for torch without waiting for operations in flight.

        They keep their tensors, and end when their peers call or their timeouts pass. Abort hooks
        run first.
        """
        if self.ended:
            return
        self.ended = True
        if self._release is not None and not self._gone:
            self.ours.hooks.aborting.call(self._name)
            self._carrier.timeout = _SOON
            self._end_others("abort")
            with contextlib.suppress(DistTimeoutError):
                self.shutdown()

    def register_abort_hook(self, hook_id: int, hook: Callable[[], None]) -> None:
        """Call a function when this process aborts the group, before anything is freed.

        Local; ranks may have different hooks. An abort is a call of ``abort()`` in this process, or
        of :meth:`reconfigure`. Where a dead rank ends the whole job, native code ends it, without
        hooks.

        Parameters
        ----------
        hook_id : int
            A number for :meth:`unregister_abort_hook`, not in use yet.
        hook : callable
            Takes nothing. Its exception is logged, and the abort goes on.
        """
        self.ours.hooks.aborting.add(hook_id, hook)

    def unregister_abort_hook(self, hook_id: int) -> None:
        """Remove a hook; a number that is not in use is ignored, as torch ignores it."""
        self.ours.hooks.aborting.remove(hook_id)

    def _end_others(self, how: str) -> None:
        messages, self._messages = self._messages, None
        if messages is not None:
            messages.free(_SOON if self._gone else self._carrier.timeout)
        if self._elsewhere is not None:
            self._elsewhere.end(how)

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> BridgeBase | None:
        """Make a group of some of this one's ranks; None on the others, which need not call it.

        The members keep this group's order, as in torch, whatever the order of `new_ranks`.
        """
        members = checked(new_ranks, self._where()[1], f"group {self._name!r}")
        if self._carrier.rank not in members:
            return None
        joining.refuse(self.ours, "new_group")
        made = new_group(
            [self.ours.members.ranks[rank] for rank in sorted(members)],
            timeout=limit_of(timeout),
            group_desc=group_desc,
            sort_ranks=False,
        )
        part = type(self)(made, lambda: _free(made))
        if self._elsewhere is not None:
            part._elsewhere = self._elsewhere.part(part, list(made.members.ranks), made.name)
        if group_name is not None:
            part.setGroupName(group_name)
        # where C++ asked, it holds the C++ part alone
        self._parts.append(part)
        return part

    # --- how a call runs -------------------------------------------------------------------------

    def _call(
        self,
        name: str,
        opts: Any,
        inputs: list[Any],
        outputs: list[Any],
        *args: Any,
        **about: Any,
    ) -> Work:
        """Run an operation of our group as torch's options say."""
        with _limited(opts):
            wants_work = getattr(opts, "asyncOp", True)  # C++ callers leave it at True
            method = shown(name, inputs, getattr(self._carrier, name), NAME)
            entry = None
            if self._recorder is not None:
                entry = self._note(TRACED_AS.get(name, name), inputs, outputs)
                method = self._recorder.inside(entry, method)
            if wants_work:
                # torch lets one rank wait and another not
                return self._collect(BridgeWork(method(*args, ASYNC_HERE, **about), outputs, entry))
            if entry is None:
                method(*args, **about)
            else:
                with entry:
                    method(*args, **about)
        return self._collect(_DONE)

    def _now(
        self, name: str, opts: Any, tensors: list[Any], method: Callable[..., Any], *args: Any
    ) -> Work:
        """Run what has no asynchronous form, in place; its handle is done."""
        with _limited(opts):
            method = shown(name, tensors, method, NAME)
            with (
                contextlib.nullcontext()
                if self._recorder is None
                else self._note(name, tensors, tensors)
            ):
                method(*args)
        return self._collect(FinishedWork(tensors))

    def _note(
        self, name: str, inputs: list[Any], outputs: list[Any], peers: str | None = None
    ) -> Entry:
        """Record an operation that begins in the flight recorder."""
        assert self._recorder is not None
        ranks = self.ours.members.ranks
        where = Where(self._name, self._description, ranks, ranks[self._carrier.rank])
        limit = call_limit() or self._carrier.timeout
        return self._recorder.add(where, name, inputs, outputs, limit, peers, backend=RECORDED_AS)

    def _collect(self, work: Work) -> Work:
        if isinstance(work, BridgeWork):
            keep_for_graphs(work)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        if device is not None and self._elsewhere is not None and self._elsewhere.has(device):
            self._elsewhere.start_coalescing(device)
        else:
            self._coalesced = []

    def _end_coalescing(self, device: torch.device | None = None) -> Work:
        if device is not None and self._elsewhere is not None and self._elsewhere.has(device):
            return self._elsewhere.end_coalescing(device)
        works, self._coalesced = self._coalesced or [], None
        return AllOf(works)

    def _serving(self, tensor: Any) -> Any:
        """The backend of messages: over MPI for GPU tensors, also if NCCL runs their collectives.

        torch starts the messages of a batch one by one, with tags and from any rank; NCCL has none
        of that, and two ranks that both send first would wait for each other.
        """
        if tensor.device.type == "cpu":
            return self._carrier
        backend = serving(self._carrier, tensor)
        host = self.ours._backends.get("cpu")
        if isinstance(backend, StagedGroup) or host is None:
            return backend
        if self._messages is None:
            self._messages = StagedGroup(host)
        return self._messages

    def _each(self, method: Callable[..., Work], outputs: Any, inputs: Any, opts: Any) -> Work:
        """Run an operation for each pair of tensors, in order; its Work is that of all.

        A rank that waits begins all at once, too: torch lets others not wait. So a rank that cannot
        begin one refuses the later ones as well.
        """
        name, due = method.__name__, max(len(outputs), len(inputs))
        with refusing_parts(agreeing(self._carrier, outputs), name, due, waits=0):
            each = begun(opts)
            works = [method(o, i, each) for o, i in zip(outputs, inputs, strict=True)]
        work = AllOf(works)
        if not getattr(opts, "asyncOp", True):
            work.wait()
        return work


def _limited(opts: Any) -> limited:
    """Give an operation the timeout of its options."""
    limit = limit_of(getattr(opts, "timeout", None))
    return limited(0.0 if limit is None else limit.total_seconds())
