"""ZeroRedundancyOptimizer after a death: its shards one by one, and divided anew."""

from __future__ import annotations

from typing import Any

from hpcdist.errors import DistError

__all__ = ["Resharding"]

_STALE = (
    "the group of this ZeroRedundancyOptimizer was reconfigured, and its state is still divided "
    "among the former ranks: call reshard(), as hpcdist.elastic does"
)


class Resharding:
    """The part of :class:`hpcdist.optim.ZeroRedundancyOptimizer` that hpcdist.elastic uses."""

    # of ZeroRedundancyOptimizer
    optim: Any
    param_groups: Any
    defaults: Any
    process_group: Any
    rank: int
    world_size: int
    _all_states: Any
    _assign: Any
    _generation: int
    _indices: Any
    _lay_out: Any
    _loads: list[int]
    _of_rank: Any
    _options: Any
    _owner: Any
    _share: Any

    def _check_generation(self) -> None:
        if self.process_group.members.generation != self._generation:
            raise DistError(_STALE)

    def shard_state(self) -> dict[int, Any]:
        """Return this rank's part of the state, by the parameters' numbers in ``state_dict``."""
        index, order = self._indices(), self._of_rank(self.rank)
        local = self.optim.state_dict()["state"]
        return {index[order[place]]: value for place, value in local.items()}

    def shard_options(self) -> list[dict[str, Any]]:
        """Return the options of the parameter groups, such as learning rates."""
        return [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups]

    def load_shard(self, state: dict[int, Any], options: list[dict[str, Any]]) -> None:
        """Load what :meth:`shard_state`, of this rank or of more, and :meth:`shard_options` gave.

        Local to this process.
        """
        index = self._indices()
        mine = self._of_rank(self.rank)
        local: dict[str, Any] = self.optim.state_dict()
        local["state"] = {
            place: state[index[p]] for place, p in enumerate(mine) if index[p] in state
        }
        for group, values in zip(local["param_groups"], options, strict=True):
            group.update(values)
        self.optim.load_state_dict(local)
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
        self.optim = kind([self._share(g) for g in self.param_groups], **self.defaults)
        self._lay_out()
        self.load_shard(state, options)
