"""Finds which parameters take part in a backward pass, on this rank and on the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch.autograd.profiler import record_function

from hpcdist._engine import counting
from hpcdist._ops import ReduceOp
from hpcdist.backends.carrier import Carrier
from hpcdist.parallel.reducer import graph

API = counting("DistributedDataParallel: parameters in use", "backward pass")
#: The search in torch's profiler, under the name that torch's own reducer gives it.
SEARCH = "torch.distributed.ddp.reducer::search_unused_parameters"


class Usage:
    """The search for parameters without gradients.

    Parameters
    ----------
    parameters : sequence of torch.Tensor
        The parameters to search.
    local : bool
        All ranks leave the same ones unused, so no exchange is needed.

    Attributes
    ----------
    shared : bool
        Whether the ranks exchange what they use.
    unreached : set of int
        Parameters to which none of the forwards since the last pass leads. A parameter can get no
        gradient for another reason too; that shows at the end of backward.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], local: bool) -> None:
        self._parameters = parameters
        self.shared = not local
        self._nodes: list[Any] = []
        self._here = bytearray(len(parameters))
        self._anywhere: np.ndarray | None = None
        self._work: Any = None
        self._searched = False
        self.unreached: set[int] = set()

    def search(self, tensors: list[torch.Tensor], mark: bool) -> None:
        """Walk through the graph behind the outputs of a forward.

        Parameters
        ----------
        tensors : list of torch.Tensor
            The outputs. If empty, an opaque object contains them, and only the end of backward
            shows the unused ones.
        mark : bool
            Whether to note which parameters it does not lead to.
        """
        if not tensors:
            self.unreached, self._searched = set(), True
            return
        with record_function(SEARCH) if mark else nullcontext():
            found = graph.reached(tensors)
        self._nodes = list(found.values())
        if mark:
            unreached = {i for i, p in enumerate(self._parameters) if id(p) not in found}
            self.unreached = self.unreached & unreached if self._searched else unreached
            self._searched = True

    def will_accumulate(self) -> bool:
        """Whether the current backward adds to the gradient of any leaf of the last search."""
        return graph.will_accumulate(self._nodes)

    def begin(self) -> None:
        """Release the graph, after backward has begun."""
        self._nodes = []

    def note(self, index: int) -> None:
        """Record that a parameter got a gradient on this rank."""
        self._here[index] = 1

    def noted(self) -> bytes:
        """Return which parameters got a gradient on this rank since the last average."""
        return bytes(self._here)

    def recall(self, noted: bytes) -> None:
        """Let those be what is noted, whatever came since."""
        self._here = bytearray(noted)

    def used(self, index: int) -> bool:
        """Return whether a parameter got a gradient on this rank since the last average."""
        return bool(self._here[index])

    def share(self, comm: Carrier, extra: int) -> None:
        """Begin the exchange with the other ranks; all must call it."""
        # A copy: the next pass may be recorded while this exchange is in flight.
        self._anywhere = np.array(self._here, np.uint8)
        if comm.size > 1 and self.shared:
            self._work = comm.all_reduce(self._anywhere, ReduceOp.MAX, True, api=API, extra=extra)

    def wait(self) -> None:
        """Wait until it is known what the others use."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    @property
    def known(self) -> bool:
        """Whether the exchange has begun, or is not needed; the same on all ranks."""
        return self._anywhere is not None or not self.shared

    def unused_anywhere(self, members: list[int], places: Iterable[int]) -> list[int]:
        """Return those of `places` in `members` whose parameters got no gradient on any rank."""
        self.wait()
        anywhere = self._here if self._anywhere is None else self._anywhere
        return [place for place in places if not anywhere[members[place]]]

    def reset(self, keep: bool = False) -> None:
        """Get ready for the next pass; `keep` what the ranks use, where it does not change."""
        self._here = bytearray(len(self._here))
        self._nodes = []
        self._work = None
        if not keep:
            self._anywhere = None
        self.unreached, self._searched = set(), False

    def forget(self) -> None:
        """Forget what ranks use of which some have gone; what this rank has noted stays."""
        self._anywhere = None
