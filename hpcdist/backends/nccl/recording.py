"""What the flight recorder learns of a group's operations over NCCL."""

from __future__ import annotations

from typing import Any

from hpcdist.flight_recorder import NCCL, Entry, Recorder, Where
from hpcdist.operations import TRACED_AS


class _Batch:
    """The entries of messages that start together."""

    def __init__(self, entries: list[Entry]) -> None:
        self._entries = entries

    def follow(self, native: Any) -> None:
        """They are in flight."""
        for entry in self._entries:
            entry.follow(native)

    def failed(self) -> None:
        """They could not start."""
        self._entries[0].failed()


class Recording:
    """The entries of one group's operations.

    Parameters
    ----------
    recorder : Recorder
        The process's flight recorder.
    where : Where
        The group.
    rank : int
        This process's rank in the group.
    """

    def __init__(self, recorder: Recorder, where: Where, rank: int) -> None:
        self._recorder = recorder
        self._where = where
        self._rank = rank
        #: Writes the dump of the first error.
        self.failed = recorder.failed

    def note(
        self, api: str, inputs: Any, outputs: Any, peer: int, seconds: float
    ) -> Entry | _Batch:
        """Record an operation that begins.

        Parameters
        ----------
        api : str
            Its public name.
        inputs, outputs : list
            Its tensors; the operations of a batch of messages.
        peer : int
            The other rank of a message; -1 for an operation of all ranks.
        seconds : float
            Its time limit.
        """
        if api == "batch_isend_irecv":
            made = [
                self._message(sends, tensor, other, seconds, place > 0)
                for place, (sends, tensor, other, _) in enumerate(inputs)
            ]
            return _Batch([*made, self._begin("coalesced", [], [], seconds, "", True)])
        if peer >= 0:
            return self._message(api == "isend", inputs[0], peer, seconds)
        return self._begin(TRACED_AS.get(api, api), inputs, outputs, seconds)

    def _message(
        self, sends: bool, tensor: Any, peer: int, seconds: float, joined: bool = False
    ) -> Entry:
        name, arrow = ("send", "->") if sends else ("recv", "<-")
        inputs, outputs = ([tensor], []) if sends else ([], [tensor])
        return self._begin(name, inputs, outputs, seconds, f"{self._rank}{arrow}{peer}", joined)

    def _begin(
        self,
        name: str,
        inputs: Any,
        outputs: Any,
        seconds: float,
        peers: str | None = None,
        joined: bool = False,
    ) -> Entry:
        return self._recorder.add(
            self._where, name, inputs, outputs, seconds, peers, joined, backend=NCCL
        )
