"""The statistics of a DistributedDataParallel: its shape, its buckets, its times."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import Any

import torch

from hpcdist import log
from hpcdist.debug_level import DebugLevel, get_debug_level, log_level
from hpcdist.parallel.reducer.bucket import wholes

_log = log.get_logger("parallel")

# Times are sampled in the first iterations, and after those in every n-th.
_FIRST = 10
_RATE = 100

# The names of dtypes in torch's logger.
_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
}

_TIMES = (
    "forward_compute_time",
    "backward_compute_time",
    "backward_comm_time",
    "backward_compute_comm_overlap_time",
)


def _sizes(buckets: Sequence[Any]) -> str:
    return ", ".join(str(sum(piece.nbytes for piece in whole)) for whole in wholes(buckets))


class Stats:
    """Statistics of one DistributedDataParallel, under the names of torch's DDP logging data.

    Times are in nanoseconds: of the last iteration that was sampled, and (``avg_``) the mean over
    all sampled ones. Forward is from the call of forward to the start of backward. Backward's
    computation ends when the last gradient is ready. Communication is from the start of the first
    bucket's to the end of the last one's; the overlap is its part before computation ended.

    Attributes
    ----------
    wait_seconds : float
        Time spent at the end of backward waiting for other ranks and for data: communication that
        computation did not hide.
    rate : int
        After the first ten iterations, every `rate`-th is sampled.
    """

    def __init__(self) -> None:
        self.wait_seconds = 0.0
        self.rate = _RATE
        self.strs: dict[str, str] = {}
        self.ints: dict[str, int] = {"iteration": 0, "has_error": 0}
        self._iterations = 0
        self.static = True  # whether the same parameters were unused in all iterations
        self._unused: frozenset[int] | None = None
        self._level = DebugLevel.OFF
        self._samples = 0
        self._sums = dict.fromkeys(_TIMES, 0)
        self._forward = self._backward = self._communication = self._computed = 0

    # -- facts that do not change ----------------------------------------------------------------

    def describe(self, **facts: Any) -> None:
        """Store facts: numbers and booleans as integers, the rest as text."""
        for name, value in facts.items():
            if isinstance(value, (bool, int)):
                self.ints[name] = int(value)
            else:
                self.strs[name] = str(value)

    def constructed(self, parameters: list[Any], buckets: list[Any]) -> None:
        """Store what construction decided; at debug level INFO and above, log it."""
        self.strs["bucket_sizes"] = _sizes(buckets)
        self.strs["dtypes"] = ", ".join(
            dict.fromkeys(_NAMES.get(p.dtype, str(p.dtype)[6:]) for p in parameters)
        )
        self._level = get_debug_level()
        # as torch has it, of the environment alone
        self.strs["torch_distributed_debug"] = (
            os.environ.get("HPCDIST_DEBUG") or os.environ.get("TORCH_DISTRIBUTED_DEBUG") or "N/A"
        ).upper()
        for name in ("cuda_visible_devices", "master_addr", "master_port"):
            self.strs[name] = os.environ.get(name.upper(), "N/A")
        sizes = [p.numel() * p.element_size() for p in parameters]
        self.describe(
            num_parameter_tensors=len(parameters),
            total_parameter_size_bytes=sum(sizes),
            has_rebuilt_buckets=False,
            unused_parameter_size=0,
        )
        if self._level >= DebugLevel.INFO:
            if not (_log.isEnabledFor(logging.INFO) or log.set_by_program()):
                log.configure(log_level())  # the debug level was set after the group's start
            facts = ", ".join(f"{k}={v}" for k, v in {**self.strs, **self.ints}.items() if v != "")
            _log.info("DistributedDataParallel constructed: %s", facts)

    def rebuilt(self, buckets: list[Any], order: list[int]) -> None:
        """Store the buckets as they are after the first iteration."""
        self.ints["has_rebuilt_buckets"] = 1
        self.strs["rebuilt_bucket_sizes"] = _sizes(buckets)
        self.strs["rebuilt_per_bucket_param_indices"] = ", ".join(
            " ".join(str(i) for piece in whole for i in piece.members) for whole in wholes(buckets)
        )
        self.strs["prev_iteration_grad_ready_order_indices"] = ", ".join(map(str, order))

    def failed(self, error: BaseException) -> None:
        """Store an error, such as one that ended a backward pass."""
        self.ints["has_error"] = 1
        self.strs["error"] = f"{type(error).__name__}: {error}"

    @property
    def begun(self) -> bool:
        """Whether an iteration has begun."""
        return self._iterations > 0

    # -- one iteration ---------------------------------------------------------------------------

    def forward_begins(self) -> None:
        """A forward that averages gradients has been called."""
        self._iterations += 1
        self._forward = time.perf_counter_ns()

    def backward_begins(self) -> None:
        """The first gradient is ready."""
        self._backward = time.perf_counter_ns()
        self._communication = 0

    def communication_begins(self) -> None:
        """The first bucket is started."""
        if not self._communication:
            self._communication = time.perf_counter_ns()

    def computed(self) -> None:
        """Backward has computed all gradients."""
        self._computed = time.perf_counter_ns()

    def finished(self, buckets: Sequence[Any], unused: frozenset[int], unused_bytes: int) -> None:
        """All buckets are reduced, and the iteration is over."""
        if self._unused is not None and unused != self._unused:
            self.static = False
        self._unused = unused
        iteration = self._iterations - 1
        if iteration >= _FIRST and iteration % self.rate:
            return
        self.ints["iteration"] = iteration
        end = time.perf_counter_ns()
        start = self._communication or self._computed
        self._samples += 1
        found = (
            self._backward - self._forward if self._forward else 0,
            self._computed - self._backward,
            end - start,
            max(0, self._computed - start),
        )
        self._forward, forward = 0, self._forward
        for name, value in zip(_TIMES, found, strict=True):
            self._sums[name] += value
            self.ints[name] = value
            self.ints[f"avg_{name}"] = self._sums[name] // self._samples
        self.ints["forward_compute_time_start"] = forward
        self.ints["backward_compute_time_start"] = self._backward
        self.ints["backward_comm_time_start"] = start
        self.ints["backward_compute_time_end"] = self._computed
        self.ints["backward_comm_time_end"] = end
        self.ints["num_buckets_reduced"] = len(wholes(buckets))
        self.ints["unused_parameter_size"] = unused_bytes
        if self._level >= DebugLevel.DETAIL:
            shown = ", ".join(f"{k}={self.ints[k] / 1e6:.3f} ms" for k in _TIMES)
            _log.info("DistributedDataParallel iteration %d: %s", iteration, shown)

    def data(self) -> dict[str, Any]:
        """Return everything in one dictionary.

        Returns
        -------
        dict
            Text and integers by name.
        """
        static = self.static and self._iterations > 1
        return {**self.strs, **self.ints, "can_set_static_graph": static}
