"""ZeroRedundancyOptimizer: the optimizer's state, divided among the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from hpcdist.backends.dispatch import agreeing
from hpcdist.backends.refusal import refusing, refusing_batches, refusing_parts
from hpcdist.collectives.objects import gather_object
from hpcdist.errors import DistError
from hpcdist.groups import joining
from hpcdist.groups.comparison import naming
from hpcdist.groups.numbers import yes_or_no
from hpcdist.groups.resolve import member
from hpcdist.groups.state import ProcessGroup
from hpcdist.parallel import optimizer_state
from hpcdist.parallel.host import on_cpu
from hpcdist.parallel.join import Join, Joinable, JoinHook
from hpcdist.parallel.optimizer_state import of_no_parameter
from hpcdist.parallel.sync import packed, send
from hpcdist.parallel.zero_arguments import API, check_dense, check_divisible, checked, compare
from hpcdist.parallel.zero_memory import Flats

_STALE = (
    "the group of this ZeroRedundancyOptimizer was reconfigured, and its state is still divided "
    "among the former ranks: call reshard(), as hpcdist.elastic does"
)
#: What each optimizer has for its own parameters.
_OWN = ("params", "param_names")


class _Hook(JoinHook):
    """Step on a rank without inputs: DDP's hook has put the others' gradients in place."""

    _follows_averages = True

    def __init__(self, zero: ZeroRedundancyOptimizer) -> None:
        self._zero = zero

    def main_hook(self) -> None:
        self._zero.step()


class ZeroRedundancyOptimizer(torch.optim.Optimizer, Joinable):
    """An optimizer that keeps, per rank, only the state of the rank's share of the parameters.

    Every rank steps its own share, and sends the new parameters to the others. All ranks of the
    group must make it with the same parameters and arguments, and use it together.

    Parameters
    ----------
    params : iterable of torch.nn.Parameter, of (str, torch.nn.Parameter) or of dict
        Parameters, with their names or without, or parameter groups, all of them. Sizes may be
        uneven: the largest are assigned first, each to the rank with the smallest share so far.
        Dtypes may differ.
    optimizer_class : type
        Class that steps the shares: any optimizer with state per parameter, not ``LBFGS``.
    process_group : ProcessGroup, optional
        None means the default group.
    parameters_as_bucket_view : bool
        Store the parameters of a share contiguously, so that each share is one message without
        packing. ``parameter.data`` is moved, and by a step moved again if it lies elsewhere then.
    overlap_with_ddp : bool
        Step in DDP's backward, bucket by bucket, through
        :func:`~hpcdist.parallel.comm_hooks.hook_with_zero_step`; ``step()`` then does nothing.
    **defaults
        Passed to `optimizer_class`, such as ``lr``.

    Attributes
    ----------
    optim : torch.optim.Optimizer
        The optimizer of this rank's share.

    Raises
    ------
    TypeError
        If `params` are neither parameters nor groups of them, or a flag is not a boolean.
    ValueError
        If there are none, one is sparse, or the class cannot step shares.
    DistMismatchError
        On all ranks, if parameters, options or classes differ: it names the first that does.
    DistTimeoutError
        If a rank does not make it within the group's timeout.

    Notes
    -----
    Source: ``torch.distributed.optim.ZeroRedundancyOptimizer``; Rajbhandari et al. 2019,
    arXiv:1910.02054. Shares are the same as there. Unlike there, the overlap with DDP trains from
    the first step, with any optimizer.
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: type[torch.optim.Optimizer],
        process_group: ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        **defaults: Any,
    ) -> None:
        self.process_group = member(process_group)
        self.world_size, self.rank = self.process_group.size(), self.process_group.rank()
        self._generation = self.process_group.members.generation
        self.hooked = False  # a hook that steps has been made
        self.hook_ran = False  # and has had a bucket
        self._owner: dict[torch.Tensor, int] = {}
        self._loads = [0] * self.world_size
        self._flats = Flats()
        self._all_states: list[dict[int, Any]] | None = None
        self.optim: Any = None
        with refusing(agreeing(self.process_group.carrier), API):
            self.parameters_as_bucket_view = yes_or_no(
                parameters_as_bucket_view, "parameters_as_bucket_view"
            )
            self.overlap_with_ddp = yes_or_no(overlap_with_ddp, "overlap_with_ddp")
            torch.optim.Optimizer.__init__(self, checked(params), defaults)
            Joinable.__init__(self)
            self.optim = optimizer_class([self._share(g) for g in self.param_groups], **defaults)
            check_divisible(self.optim)
            # Show the class's defaults, as any optimizer does; schedulers look for them.
            self._given = defaults
            self.defaults = {**defaults, **getattr(self.optim, "defaults", {})}
            self._options(self.optim.param_groups, self.param_groups)
            if not joining.defers(self.process_group, self):
                compare(self.process_group, type(self.optim), self.param_groups)
        self._lay_out()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"a {API} can be neither copied nor pickled, because its shares belong to the ranks of "
            "its group: save state_dict(), after consolidate_state_dict(), and load it into another"
        )

    # -- shares --------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take more parameters; all ranks must call it.

        Parameters
        ----------
        param_group : dict
            ``"params"`` and options.

        Raises
        ------
        ValueError
            If one of them is sparse, or in another group already.
        RuntimeError
            With ``overlap_with_ddp``, if a hook steps in backward already.
        DistMismatchError
            On all ranks, if they add others. Nothing is added then.
        """
        before, loads = len(self.param_groups), self._loads[:]
        try:
            with refusing(agreeing(self.process_group.carrier), API):
                if self.hooked:
                    raise RuntimeError(
                        "with overlap_with_ddp=True all parameter groups must be added before "
                        "hook_with_zero_step"
                    )
                super().add_param_group(param_group)
                group = self.param_groups[-1]
                check_dense(group["params"])
                self._assign(group)
                if self.optim is not None:
                    self.optim.add_param_group(self._share(group))
                    # The other groups' may have changed since the last step.
                    self._options(self.optim.param_groups[-1:], self.param_groups[-1:])
                    if not joining.defers(self.process_group, self):
                        compare(self.process_group, type(self.optim), [group])
        except BaseException:
            self._remove(before, loads)
            raise
        if self.optim is not None:
            self._lay_out()

    def _remove(self, before: int, loads: list[int]) -> None:
        """Forget the parameter groups behind the first so many, which could not be added."""
        for group in self.param_groups[before:]:
            for parameter in group["params"]:
                self._owner.pop(parameter, None)
        del self.param_groups[before:]
        if self.optim is not None:
            del self.optim.param_groups[before:]
        self._loads = loads

    def _assign(self, group: dict[str, Any]) -> None:
        for parameter in sorted(group["params"], key=lambda p: p.numel(), reverse=True):
            rank = min(range(self.world_size), key=self._loads.__getitem__)
            self._owner[parameter] = rank
            self._loads[rank] += parameter.numel()

    def _share(self, group: dict[str, Any], rank: int | None = None) -> dict[str, Any]:
        """Return a parameter group with only the parameters of one rank, largest first."""
        rank = self.rank if rank is None else rank
        mine = [p for p in group["params"] if self._owner[p] == rank]
        options = {name: value for name, value in group.items() if name not in _OWN}
        return {**options, "params": sorted(mine, key=lambda p: p.numel(), reverse=True)}

    def _of_rank(self, rank: int) -> list[torch.Tensor]:
        """Return the parameters of a rank in the order of its local optimizer."""
        return [p for group in self.param_groups for p in self._share(group, rank)["params"]]

    def _lay_out(self) -> None:
        """Move the parameters of each share into one tensor per dtype and device."""
        if self.parameters_as_bucket_view and not self.overlap_with_ddp:
            self._flats.lay_out(self._of_rank(rank) for rank in range(self.world_size))

    # -- steps ---------------------------------------------------------------------------------

    def step(self, closure: Callable[[], float] | None = None, **kwargs: Any) -> Any:
        """Step this rank's share, and exchange parameters; all ranks must call it.

        Parameters
        ----------
        closure : callable, optional
            Evaluates the model again and returns the loss; passed to the local optimizer.
        **kwargs
            Passed on, too.

        Returns
        -------
        object
            What the local optimizer returns; None with ``overlap_with_ddp``.

        Raises
        ------
        RuntimeError
            With ``overlap_with_ddp``, if no hook steps in backward.
        DistError
            If the group was reconfigured, and the shares are still those of the former ranks.
        """
        if self.overlap_with_ddp:
            # A hook that was made and never registered has no bucket, though there are gradients.
            if not self.hooked or not (self.hook_ran or self._without_gradients()):
                raise RuntimeError(
                    "nothing steps this optimizer: with overlap_with_ddp=True register "
                    "hook_with_zero_step(allreduce_hook, ddp, zero) with the DDP model"
                )
            return None
        self._check_generation()
        self._all_states = None
        Join.notify_join_context(self)
        try:
            loss = self._local_step(closure, **kwargs)
        except BaseException:
            with self._refusing():  # only now: what the closure has called is no part of this
                raise
        self._exchange()
        return loss

    def _without_gradients(self) -> bool:
        return all(p.grad is None for p in self._owner)

    def _local_step(self, closure: Any = None, **kwargs: Any) -> Any:
        self._options(self.param_groups, self.optim.param_groups)
        if closure is not None:
            kwargs["closure"] = closure
        loss = self.optim.step(**kwargs)
        self._options(self.optim.param_groups, self.param_groups)
        return loss

    def _step_some(self, parameters: Iterable[torch.Tensor]) -> None:
        """Step those of this rank's parameters that are among the given ones."""
        chosen = set(parameters)
        whole = [group["params"] for group in self.optim.param_groups]
        try:
            for group in self.optim.param_groups:
                group["params"] = [p for p in group["params"] if p in chosen]
            self._local_step()
        finally:
            for group, params in zip(self.optim.param_groups, whole, strict=True):
                group["params"] = params

    @staticmethod
    def _options(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
        """Copy learning rates and the like, which schedulers change, between groups."""
        for one, other in zip(source, target, strict=True):
            other.update({name: value for name, value in one.items() if name not in _OWN})

    def _exchange(self) -> None:
        """Send every share to all ranks, in its own memory or packed into few messages."""
        if self.world_size == 1:
            return
        group = self.process_group
        if not self.parameters_as_bucket_view:
            with self._refusing():
                for rank in range(self.world_size):
                    send(group, packed(self._of_rank(rank)), rank, API)
            return
        with naming("the strides of its parameters"):
            with self._refusing():
                if self._flats.moved():
                    self._lay_out()
                works = [
                    group.carrier.broadcast(flat, rank, True, api=API, extra=order)
                    for rank, flat, order in self._flats.all
                ]
            for work in works:
                work.wait()

    def _refusing(self) -> refusing_parts:
        """Let the other ranks, which are in :meth:`_exchange` or will be, hear an exception."""
        comm = agreeing(self.process_group.carrier)
        if self.parameters_as_bucket_view:
            return refusing_parts(comm, API, lambda: len(self._flats.all), waits=0)
        shares = range(self.world_size)
        return refusing_batches(comm, API, lambda: [len(packed(self._of_rank(r))) for r in shares])

    # -- uneven inputs -------------------------------------------------------------------------

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook that steps on a rank without inputs.

        Local to this process. In a :class:`~hpcdist.parallel.Join` list the model before this
        optimizer.

        Parameters
        ----------
        **kwargs
            Ignored.

        Returns
        -------
        JoinHook
            A new one.
        """
        return _Hook(self)

    @property
    def join_device(self) -> torch.device:
        """The device of the first parameter."""
        return self.param_groups[0]["params"][0].device

    @property
    def join_process_group(self) -> ProcessGroup:
        """The group whose ranks share the state."""
        return self.process_group

    # -- state ---------------------------------------------------------------------------------

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collect the states of all shares on one rank; all ranks must call it.

        Parameters
        ----------
        to : int
            Rank of the group on which :meth:`state_dict` can be called afterwards, until the next
            step. It gets the states in ordinary memory, also those of GPUs.

        Raises
        ------
        DistError
            If the group was reconfigured, as for :meth:`step`.
        """
        self._check_generation()
        self._options(self.param_groups, self.optim.param_groups)
        state = on_cpu(self.optim.state_dict()["state"])
        here = self.rank == to
        states: list[Any] | None = [None] * self.world_size if here else None
        gather_object(state, states, group=self.process_group, group_dst=to)
        self._all_states = states

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the whole optimizer, as an unsharded one would.

        Local to this process, on which :meth:`consolidate_state_dict` must have collected the
        state since the last step.

        Returns
        -------
        dict
            With ``"state"`` and ``"param_groups"``, for :meth:`load_state_dict` on any number of
            ranks, or of the unsharded optimizer.

        Raises
        ------
        RuntimeError
            If the states were not collected here, or are those before a later step.
        """
        if self._all_states is None:
            raise RuntimeError(
                f"the optimizer's state after the last step is not on rank {self.rank} of the "
                f"group: call consolidate_state_dict(to={self.rank}) on all ranks before "
                "state_dict()"
            )
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        index = self._indices()
        state: dict[Any, Any] = {}
        for rank, local in enumerate(self._all_states):
            state.update(self._numbered(rank, local))
        groups = []
        for group in self.param_groups:
            groups.append({**group, "params": [index[p] for p in group["params"]]})
        ordered = {i: state.pop(i) for i in range(len(index)) if i in state} | state
        whole: dict[str, Any] = {"state": ordered, "param_groups": groups}
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, whole)
            whole = whole if changed is None else changed
        return whole

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a whole state; each rank keeps its share.

        Local to this process; call it on all ranks with the same state.

        Parameters
        ----------
        state_dict : dict
            From :meth:`state_dict`, here or of the unsharded optimizer.

        Raises
        ------
        ValueError
            If its parameter groups are not those of this optimizer.
        """
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        groups = state_dict["param_groups"]
        sizes = [len(g["params"]) for g in groups]
        if sizes != [len(g["params"]) for g in self.param_groups]:
            raise ValueError(
                f"a state for parameter groups of {sizes} parameters does not fit groups of "
                f"{[len(g['params']) for g in self.param_groups]}"
            )
        index = self._indices()
        numbers = [number for group in groups for number in group["params"]]
        state = state_dict["state"]
        whole = {key: value for key, value in state.items() if of_no_parameter(key)}
        local: dict[str, Any] = {"state": whole, "param_groups": []}
        for place, parameter in enumerate(self._of_rank(self.rank)):
            number = numbers[index[parameter]]
            if number in state:
                local["state"][place] = state[number]
        first = 0
        for group, mine in zip(groups, self.optim.param_groups, strict=True):
            count = len(mine["params"])
            options = {name: value for name, value in group.items() if name not in _OWN}
            local["param_groups"].append({**options, "params": list(range(first, first + count))})
            first += count
        self.optim.load_state_dict(local)
        self._options(self.optim.param_groups, self.param_groups)
        self._all_states = None
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _numbered(self, rank: int, state: dict[Any, Any]) -> dict[Any, Any]:
        """Return a rank's state by the parameters' numbers among all."""
        index, order = self._indices(), self._of_rank(rank)
        return {k if of_no_parameter(k) else index[order[k]]: v for k, v in state.items()}

    def _indices(self) -> dict[torch.Tensor, int]:
        ordered = [p for group in self.param_groups for p in group["params"]]
        return {parameter: number for number, parameter in enumerate(ordered)}

    # --- after a death: the shards one by one, and divided among fewer ranks ---

    def _check_generation(self) -> None:
        if self.process_group.members.generation != self._generation:
            raise DistError(_STALE)

    def shard_state(self) -> dict[int, Any]:
        """Return this rank's part of the state, by the parameters' numbers in ``state_dict``."""
        return self._numbered(self.rank, self.optim.state_dict()["state"])

    def shard_options(self) -> list[dict[str, Any]]:
        """Return the options of the parameter groups, such as learning rates."""
        return [{k: v for k, v in g.items() if k not in _OWN} for g in self.param_groups]

    def keep_groups(self, many: int) -> None:
        """Forget the parameter groups behind the first so many; local."""
        loads = self._loads[:]
        for parameter in (p for group in self.param_groups[many:] for p in group["params"]):
            loads[self._owner[parameter]] -= parameter.numel()
            self.optim.state.pop(parameter, None)
        if many < len(self.param_groups):
            self._remove(many, loads)
            self._lay_out()

    def load_shard(self, state: dict[int, Any], options: list[dict[str, Any]]) -> None:
        """Load what :meth:`shard_state`, of this rank or of more, and :meth:`shard_options` gave.

        Local to this process.
        """
        self._generation = self.process_group.members.generation
        index = self._indices()
        mine = self._of_rank(self.rank)
        local: dict[str, Any] = self.optim.state_dict()
        local["state"] = {key: state[key] for key in state if of_no_parameter(key)}
        for place, parameter in enumerate(mine):
            if index[parameter] in state:
                local["state"][place] = state[index[parameter]]
        for group, values in zip(local["param_groups"], options, strict=True):
            group.update(values)
        optimizer_state.load(self.optim, local)
        self._options(self.optim.param_groups, self.param_groups)
        self._all_states = None

    def reshard(self, state: dict[int, Any], options: list[dict[str, Any]]) -> None:
        """Divide the parameters anew, among the ranks that the group has now; local.

        Parameters
        ----------
        state : dict
            Of all parameters, as :meth:`shard_state` gives it.
        options : list of dict
            From :meth:`shard_options`.
        """
        self.world_size, self.rank = self.process_group.size(), self.process_group.rank()
        self._generation = self.process_group.members.generation
        self._loads = [0] * self.world_size
        self._owner.clear()
        for group in self.param_groups:
            self._assign(group)
        kind, self.optim = type(self.optim), None
        self.optim = kind([self._share(g) for g in self.param_groups], **self._given)
        self._lay_out()
        self.load_shard(state, options)
