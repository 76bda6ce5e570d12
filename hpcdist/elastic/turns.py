"""The loop over this rank's shares of a batch, inside a step."""

from __future__ import annotations

from hpcdist.elastic.batch import Batch
from hpcdist.groups.world import world
from hpcdist.parallel.ddp.shares import Apart


class Turns:
    """Yields this rank's shares; after the last one the gradients of all shares are averaged.

    While each rank has one share, DistributedDataParallel does that in backward.

    Parameters
    ----------
    batch : Batch
        Its shares.

    Attributes
    ----------
    ended : bool
        Whether the loop has come to its end.
    """

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._left = list(batch.mine)
        self._apart: list[Apart] = []
        self._begun = self._running = self.ended = False

    def __iter__(self) -> Turns:
        return self

    def __next__(self) -> int:
        if self._batch.is_plain:
            self.ended = not self._left
        elif not self.ended:
            self._turn()
        if self.ended:
            raise StopIteration
        return self._left.pop(0)

    def _turn(self) -> None:
        """End one share, and begin the next one if there is one."""
        if not self._begun:
            self._begun = True
            self._batch.spread()
            for model in self._batch.models():
                self._apart.append(Apart(model, self._batch.dealt, self._apart))
                self._apart[-1].begin()
        if self._running:
            for each in self._apart:
                each.stop()
        self._running = bool(self._left)
        if self._left:
            self._batch.turn_to(self._left[0])
            for each in self._apart:
                each.start()
            return
        for each in self._apart:
            each.average()
        if self._batch.live is not None:
            self._batch.turn_to(min(self._batch.dealt[world.comm.rank]))
        self.close()
        self.ended = True

    def close(self) -> None:
        """Let the models average as always again; local. Also after an error."""
        for each in self._apart:
            each.end()
        self._apart = []
