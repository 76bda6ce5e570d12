"""A rank's memory in a window that a thread of that rank reads and writes, asked by messages."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from hpcdist import _engine
from hpcdist._buffer import limited
from hpcdist._engine import WINDOW_REPLY, WINDOW_SHORT, Work, outcome_of, request_of, tags
from hpcdist.errors import DistBackendError
from hpcdist.groups.windows.data import bytes_of, fill_from, is_plain

if TYPE_CHECKING:
    import torch

#: Of this process's requests.
_numbers = itertools.count()

#: A message: what begins it, its bytes, its tag and its kind.
_Message = tuple[Callable[..., Work], Any, int, int]


class RemotePart:
    """Memory of a rank that this process cannot map.

    Each call waits until the rank has answered: then the data are where they belong. A timeout
    leaves open whether they will be.

    Parameters
    ----------
    comm : Comm
        The group's.
    window : int
        The number of the registration.
    rank : int
        Whose memory it is.
    numel : int
        Its elements.
    dtype : torch.dtype
        Their type.
    """

    def __init__(self, comm: Any, window: int, rank: int, numel: int, dtype: torch.dtype) -> None:
        self._comm, self._window, self._rank = comm, window, rank
        self.numel, self.dtype = numel, dtype

    def check(self, what: str) -> None:
        """Raise nothing: the rank itself looks whether its memory is there."""

    def put(self, tensor: torch.Tensor, offset: int, seconds: float | None) -> None:
        """Write a tensor there, from an element on."""
        self._send("put", _engine.PUT, tensor, offset, seconds)

    def accumulate(self, tensor: torch.Tensor, offset: int, op: Any, seconds: float | None) -> None:
        """Combine a tensor with what is there, from an element on."""
        self._send("accumulate", _engine.ACCUMULATION, tensor, offset, seconds, op)

    def get(self, tensor: torch.Tensor, offset: int, seconds: float | None) -> None:
        """Read into a tensor, from an element on."""
        import torch

        direct = is_plain(tensor)
        into = tensor if direct else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        data = bytes_of(into)
        number, request = self._request(_engine.GET, data.numel(), offset)
        brings = data.numel() if data.numel() <= WINDOW_SHORT else 0
        answer = bytearray(WINDOW_REPLY + brings)
        messages = [self._request_message(request)]
        if not brings and data.numel():
            fetched = (self._comm.irecv, data.numpy(), self._tag(number), _engine.WINDOW_FETCHES)
            messages.insert(0, fetched)
        self._exchange("get", number, answer, messages, seconds)
        if brings:
            data.copy_(torch.frombuffer(answer, dtype=torch.uint8, offset=WINDOW_REPLY))
        if not direct:
            fill_from(tensor, into.view(-1), "get")

    def _send(
        self,
        what: str,
        call: int,
        tensor: torch.Tensor,
        offset: int,
        seconds: float | None,
        op: Any = None,
    ) -> None:
        data = bytes_of(tensor)
        typed = data.view(self.dtype)
        self._comm.refuse_nan(typed, what)
        number, request = self._request(call, data.numel(), offset, typed, op)
        messages = [self._request_message(request)]
        if data.numel() > WINDOW_SHORT:
            # Before the request: other threads ask too, and the rank waits for the data of a
            # request before it looks at the next one.
            brought = (self._comm.isend, data.numpy(), self._tag(number), _engine.WINDOW_BRINGS)
            messages.insert(0, brought)
        else:
            messages[0] = self._request_message(request + data.numpy().tobytes())
        self._exchange(what, number, bytearray(WINDOW_REPLY), messages, seconds)

    # ---- messages ----

    def _tag(self, number: int) -> int:
        return number % tags(self._comm)

    def _request(
        self, call: int, nbytes: int, offset: int, typed: Any = None, op: Any = None
    ) -> tuple[int, bytes]:
        number, at = next(_numbers), offset * self.dtype.itemsize
        return number, request_of(self._comm, call, self._window, number, at, nbytes, typed, op)

    def _request_message(self, request: bytes) -> _Message:
        return self._comm.isend, request, 0, _engine.WINDOW_REQUEST

    def _exchange(
        self,
        what: str,
        number: int,
        answer: bytearray,
        messages: list[_Message],
        seconds: float | None,
    ) -> None:
        """Begin the messages, the receive of the answer first, and wait until all have ended."""
        first = (self._comm.irecv, answer, self._tag(number), _engine.WINDOW_ANSWER)
        begin = [
            partial(post, buffer, self._rank, tag, tag_kind=kind, api=what)
            for post, buffer, tag, kind in [first, *messages]
        ]
        works: list[Work] = []
        # No handler of the process's signals runs inside extend(): all are begun, or none.
        try:
            with limited(0.0 if seconds is None else max(seconds, 1e-9)):  # 0 is no limit
                works.extend(map(partial.__call__, begin))
            works[0].wait()
            refused = outcome_of(answer, number)
            if refused:
                raise DistBackendError(
                    f"{what}: rank {self._rank} of group {self._comm.name!r} has refused it: "
                    f"{refused} (this is rank {self._comm.rank})"
                )
            for work in works[1:]:
                work.wait()
        except BaseException:
            # First and in one instruction: a second handler may raise at the next one. What was
            # asked for goes on without this call, but into no tensor of the program's.
            _ = [*map(Work.let_go, works[1:])]
            raise
