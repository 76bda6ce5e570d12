"""The state that PowerSGD keeps between steps."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from hpcdist.groups.numbers import whole
from hpcdist.groups.state import ProcessGroup
from hpcdist.log import get_logger
from hpcdist.parallel.comm_hooks import powersgd_checks
from hpcdist.parallel.comm_hooks._buckets import begins
from hpcdist.parallel.comm_hooks._counting import Counting
from hpcdist.parallel.comm_hooks._future import Pipeline
from hpcdist.parallel.comm_hooks.powersgd_undo import Before
from hpcdist.parallel.reducer.grad_bucket import GradBucket

_log = get_logger("comm_hooks")

_OPTIONS = (
    "matrix_approximation_rank",
    "start_powerSGD_iter",
    "min_compression_rate",
    "use_error_feedback",
    "warm_start",
    "orthogonalization_epsilon",
    "compression_stats_logging_frequency",
    "batch_tensors_with_same_shape",
)
_MEMORY = ("error_dict", "p_memory_dict", "q_memory_dict", "error_pool", "q_pool")
_LAYOUTS = ("error_layout", "q_layout")
_COUNTERS = (
    "iter",
    "total_numel_before_compression",
    "total_numel_after_compression",
    "next_stats_report",
)

#: Of a flat tensor: the number of each parameter with a part in it, and the part's elements.
Layout = list[list[int]]


class PowerSGDState(Counting):
    """Settings and memory of :func:`powerSGD_hook` and :func:`batched_powerSGD_hook`.

    All ranks must make it, with the same arguments; making it is local. Each model that is trained
    needs one of its own: the memory goes by the numbers of a model's parameters.

    Parameters
    ----------
    process_group : ProcessGroup, optional
        The group that averages. None means the default group.
    matrix_approximation_rank : int
        Rank of the approximation, from 1. What is sent grows with it; 1 to 4 are usual.
    start_powerSGD_iter : int
        Steps at the beginning that average without compression, at least 2 with error feedback or
        warm start, because DDP rebuilds its buckets after the first. A tenth of all steps is a
        good start.
    min_compression_rate : float
        Tensors that would not become this many times smaller are sent as they are, and so are
        vectors.
    use_error_feedback : bool
        Add what compression lost to the gradients of the next step.
    warm_start : bool
        Begin each step with the Q of the one before, in place of random numbers.
    orthogonalization_epsilon : float
        Added to the norms of columns, which must not be zero. 0 is the most precise.
    random_seed : int
        Of the first Q; the same on all ranks.
    compression_stats_logging_frequency : int
        Steps between two lines about compression in the log.
    batch_tensors_with_same_shape : bool
        Compress tensors of one shape in one batched product. Pays with large buckets of small
        tensors.

    Raises
    ------
    TypeError
        If an option is no number, or no whole one where that is needed, or a flag is not a boolean.
    ValueError
        If `start_powerSGD_iter` is too small, the approximation's rank below 1, or the epsilon
        negative or infinite.

    Notes
    -----
    It can be pickled, without its group: set ``process_group`` after loading, or the default group
    is used. :meth:`state_dict` holds plain values and tensors only. The local errors differ between
    ranks: save it on each. Source:
    ``torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook.PowerSGDState``.
    """

    def __init__(
        self,
        process_group: ProcessGroup | None,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
    ) -> None:
        self.process_group = process_group
        self.matrix_approximation_rank = matrix_approximation_rank
        self.start_powerSGD_iter: float = start_powerSGD_iter
        self.min_compression_rate = min_compression_rate
        self.use_error_feedback = use_error_feedback
        self.warm_start = warm_start
        self.orthogonalization_epsilon = orthogonalization_epsilon
        self.compression_stats_logging_frequency: float = compression_stats_logging_frequency
        self.batch_tensors_with_same_shape = batch_tensors_with_same_shape
        self._set(powersgd_checks.options({name: getattr(self, name) for name in _OPTIONS}))
        self.rng = np.random.RandomState(whole(random_seed, "random_seed"))
        self.error_dict: dict[int, torch.Tensor] = {}
        self.p_memory_dict: dict[int, torch.Tensor] = {}
        self.q_memory_dict: dict[int, torch.Tensor] = {}
        # Where parameters are in the errors and in Q, and the parts of those that have moved.
        self.error_layout: dict[int, Layout] = {}
        self.q_layout: dict[int, Layout] = {}
        self.error_pool: dict[int, torch.Tensor] = {}
        self.q_pool: dict[int, torch.Tensor] = {}
        self.iter = 0
        self.total_numel_before_compression = 0
        self.total_numel_after_compression = 0
        self.next_stats_report: float = 0
        self._pipeline = Pipeline()
        self._before: Before | None = None  # of a pass whose averages are not there

    def state_dict(self) -> dict[str, Any]:
        """All settings and memory, as plain values and tensors that ``torch.load`` takes.

        Local to this process.

        Returns
        -------
        dict
            Without the group. The tensors are those in use: save or copy them before the next step.
            In a pass, and after one that was given up, those before it.
        """
        state = {name: getattr(self, name) for name in (*_OPTIONS, *_COUNTERS)}
        state.update({name: dict(getattr(self, name)) for name in (*_MEMORY, *_LAYOUTS)})
        state["rng"] = copy.deepcopy(self.rng)
        if self._before is not None:
            shown = SimpleNamespace(**state)
            self._before.restore(shown)
            state = vars(shown)
        kind, keys, position, has_gauss, gauss = state["rng"].get_state(legacy=True)
        state["rng"] = [str(kind), [int(key) for key in keys], position, has_gauss, gauss]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`; every rank must load its own.

        Parameters
        ----------
        state_dict : dict
            Of a state for the same model and number of ranks.

        Raises
        ------
        TypeError
            If an entry has another type than in the result of :meth:`state_dict`.
        ValueError
            If entries are missing or unknown, or a number is none that the constructor takes. The
            state is as before then.
        """
        wanted = {*_OPTIONS, *_MEMORY, *_LAYOUTS, *_COUNTERS, "rng"}
        if set(state_dict) != wanted:
            raise ValueError(
                f"no state of PowerSGD: missing {sorted(wanted - set(state_dict))}, unknown "
                f"{sorted(set(state_dict) - wanted)}"
            )
        checks = powersgd_checks
        found = checks.options({name: state_dict[name] for name in _OPTIONS})
        found.update({name: checks.counter(state_dict[name], name) for name in _COUNTERS})
        found.update({name: checks.memory(state_dict[name], name) for name in _MEMORY})
        found.update({name: checks.layouts(state_dict[name], name) for name in _LAYOUTS})
        found["rng"] = checks.random_numbers(state_dict["rng"])
        self._set(found)
        self._before = None

    def _set(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)

    def __getstate__(self) -> dict[str, Any]:
        return self.state_dict()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.process_group = None
        self._pipeline = Pipeline()
        self._before = None
        self.load_state_dict(state)

    def _count_step(self) -> None:
        """Count a step, and log the statistics when it is time."""
        if self.iter >= max(self.start_powerSGD_iter, self.next_stats_report):
            rate, total, sent = self.compression_stats()
            _log.info(
                "PowerSGD at step %d: %d elements became %d, %.1f times fewer",
                self.iter, total, sent, rate,
            )  # fmt: skip
            self.next_stats_report = self.iter + self.compression_stats_logging_frequency
        super()._count_step()
        if self._before is not None and not self._before.finite:
            self._undo()
        if self._before is not None:
            self._before.redraw(self._draw)
        self._before = None
        if self.iter == self.start_powerSGD_iter:
            _log.info("PowerSGD starts after %d steps", self.iter)

    def compression_stats(self) -> tuple[float, int, int]:
        """Return how much smaller the gradients became.

        Local to this process.

        Returns
        -------
        tuple
            Elements before compression by elements after it (0 if there were none), the number
            before, and the number after.
        """
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return (before / after if after else 0, before, after)

    def _begin(self, bucket: GradBucket) -> None:
        """Note that a bucket begins, and undo with the first one a pass that was given up."""
        if begins(bucket):
            self._undo()
            if getattr(bucket, "_first", False):
                self._before = Before(self)

    def _replace_error(self, index: int, error: torch.Tensor) -> None:
        """Set the error of a bucket; keep the former one until it is known that the pass counts."""
        if self._before is not None:
            self._before.keep_error(index, self.error_dict.get(index))
        self.error_dict[index] = error

    def _keep_q(self, index: int, q: torch.Tensor | None) -> None:
        """Save the Q of a bucket before a pass overwrites it; None: it starts from a random Q."""
        if self._before is not None:
            self._before.keep_q(index, q)

    def _see(self, averages: torch.Tensor) -> None:
        """Look at what a pass has averaged: one that is not finite leaves nothing behind."""
        if self._before is not None:
            self._before.see(averages)

    def _see_q(self, qs: list[torch.Tensor]) -> None:
        """Note the Q that the next pass begins with: its columns of zeros are drawn again."""
        if self._before is not None and self.warm_start:
            for q in qs:
                self._before.see_q(q)

    def _draw(self, qs: list[torch.Tensor]) -> None:
        """Fill each Q with normal numbers, the same on all ranks, whatever the global generator."""
        generator = torch.Generator()
        generator.manual_seed(int(self.rng.randint(1_000_000_000)))
        for q in qs:
            q.copy_(torch.randn(q.shape, generator=generator, dtype=q.dtype))

    def _undo(self) -> None:
        before, self._before = self._before, None
        if before is not None:
            before.restore(self)

    def _follow(self, index: int, layout: Layout) -> None:
        """Let the memory follow the parameters, if those of a bucket are not what they were.

        A new DistributedDataParallel, as after a restart, begins with another order of buckets than
        the one it finds in its first step.
        """
        if self.error_layout.get(index, layout) != layout:
            for other in [i for i in self.error_layout if i >= index]:  # those before have followed
                self._part(other)
        self.error_layout[index] = layout

    def _part(self, index: int) -> None:
        for memory, layouts, pool in (
            (self.error_dict, self.error_layout, self.error_pool),
            (self.q_memory_dict, self.q_layout, self.q_pool),
        ):
            flat, layout = memory.pop(index, None), layouts.pop(index, [])
            counts = [count for _, count in layout]
            if flat is not None and flat.numel() >= sum(counts):
                parts = flat[: sum(counts)].split(counts)
                pool.update({n: part for (n, _), part in zip(layout, parts, strict=True)})
        self.p_memory_dict.pop(index, None)  # rebuilt at every step

    @staticmethod
    def _joined(
        pool: dict[int, torch.Tensor], layout: Layout, like: torch.Tensor
    ) -> tuple[torch.Tensor | None, bool]:
        """Join the parts of parameters, zeros for missing ones; whether none is missing."""
        found = [pool.pop(number, None) for number, _ in layout]
        if all(part is None for part in found):
            return None, False
        parts, whole = [], True
        for part, (_, count) in zip(found, layout, strict=True):
            if part is None or part.numel() != count:
                part, whole = like.new_zeros(count), False
            parts.append(part.to(like))
        return torch.cat(parts), whole

    def _count(self, before: int, after: int) -> None:
        """Add a bucket to the statistics."""
        self.total_numel_before_compression += before
        self.total_numel_after_compression += after
