"""The interface of a library that is compared: its calls on the same buffers as the others'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any

from .errors import BenchError, Unsupported
from .formats import Table
from .job import MpiJob
from .measure import Batch
from .operations import Case

if TYPE_CHECKING:
    import torch

#: A function and its arguments.
Call = tuple[Callable[..., Any], tuple[Any, ...]]
#: Waits for what was started.
Wait = Callable[[], Any]


@dataclass(frozen=True)
class Messages:
    """A library's point to point.

    Parameters
    ----------
    send, recv, isend, irecv : callable
        Take what `buffer` makes of a tensor, and the other rank.
    wait_all : callable
        Takes a list of what isend and irecv return.
    buffer : callable
        Tensor -> what the library takes; done once, not in the loop.
    """

    send: Callable[..., Any]
    recv: Callable[..., Any]
    isend: Callable[..., Any]
    irecv: Callable[..., Any]
    wait_all: Callable[[list[Any]], Any]
    buffer: Callable[[torch.Tensor], Any]


class Library:
    """A library that is compared.

    What makes a batch, a function of the number of calls, raises :class:`Unsupported` if the
    library has no such operation.

    Attributes
    ----------
    name : str
        In tables and options.
    moves : bool
        Whether a call leaves the operation's result, so that it can be compared.
    """

    name = ""
    moves = True

    def open(self, job: MpiJob) -> None:
        """Prepare the library. All ranks call it.

        Raises
        ------
        Unsupported
            If it is not here; it may be so on one rank alone.
        """

    def close(self) -> None:
        """Free what `open` has allocated. All ranks call it."""

    def call(self, case: Case) -> Call:
        """Return the function that does a collective, and the tuple of its arguments.

        Nothing of ours stands between it and the loop.
        """
        raise Unsupported("no collectives")

    def batch(self, case: Case) -> Batch:
        """What makes a number of calls of a collective."""
        function, arguments = self.call(case)

        def run(calls: int) -> None:
            for _ in repeat(None, calls):
                function(*arguments)

        return run

    def start(self, case: Case) -> Callable[[], Wait]:
        """What starts an asynchronous all_reduce of a case, and returns what waits for it."""
        raise Unsupported("no asynchronous all_reduce")

    def messages(self) -> Messages:
        """What sends and receives single messages."""
        raise Unsupported("no point to point")

    def ping_pong(self, send: torch.Tensor, recv: torch.Tensor, peer: int, begins: bool) -> Batch:
        """What sends a message there and back a number of times.

        Parameters
        ----------
        send, recv : torch.Tensor
            The messages.
        peer : int
            The other rank.
        begins : bool
            Whether this rank sends first.
        """
        its = self.messages()
        put, get, out, back = its.send, its.recv, its.buffer(send), its.buffer(recv)

        def first(calls: int) -> None:
            for _ in repeat(None, calls):
                put(out, peer)
                get(back, peer)

        def second(calls: int) -> None:
            for _ in repeat(None, calls):
                get(back, peer)
                put(out, peer)

        return first if begins else second

    def stream(self, tensor: torch.Tensor, peer: int, sends: bool, window: int) -> Batch:
        """What sends or receives windows of messages, each window answered by one.

        Parameters
        ----------
        tensor : torch.Tensor
            One message; all of a window use its memory.
        peer : int
            The other rank.
        sends : bool
            Whether this rank sends.
        window : int
            Messages in flight together.
        """
        import torch

        its = self.messages()
        data, answer = its.buffer(tensor), its.buffer(torch.zeros(1))
        start, end = (its.isend, its.recv) if sends else (its.irecv, its.send)
        wait_all = its.wait_all

        def run(calls: int) -> None:
            for _ in repeat(None, calls):
                wait_all([start(data, peer) for _ in repeat(None, window)])
                end(answer, peer)

        return run


def open_libraries(
    job: MpiJob, table: Table, kinds: Sequence[type[Library]], names: Sequence[str]
) -> list[Library]:
    """Open the libraries that are installed, and note which are not. All ranks call it.

    Parameters
    ----------
    job : MpiJob
        The ranks.
    table : Table
        Where to say it.
    kinds : sequence of type
        The classes of the libraries.
    names : sequence of str
        Which of them.

    Returns
    -------
    list of Library
        The same on all ranks; BenchError there if it would be empty.
    """
    import torch

    # Its worker threads spin for a while after each use, on cores that the measurement needs.
    torch.set_num_threads(1)
    found = []
    for library in (kind() for kind in kinds if kind.name in names):
        problem = None
        try:
            library.open(job)
        except Unsupported as error:
            problem = str(error)
        problem = job.problem(problem)
        if problem is None:
            found.append(library)
        else:
            table.note(f"without {library.name}: {problem}")
    if not found:
        raise BenchError("none of the libraries asked for is here")
    return found


def collect_batches(
    job: MpiJob,
    table: Table,
    libraries: Sequence[Library],
    make: Callable[[Library], Batch],
    left_out: set[str],
) -> dict[str, Batch]:
    """Return what each library runs in one row; without those that cannot on some rank.

    Parameters
    ----------
    job : MpiJob
        The ranks, which all call it.
    table : Table
        Gets a note for a library that is not in `left_out` yet.
    libraries : sequence of Library
        The contenders.
    make : callable
        Makes a library's batch, or raises :class:`Unsupported`.
    left_out : set of str
        Names of the libraries with a note.
    """
    batches: dict[str, Batch] = {}
    for library in libraries:
        problem = None
        try:
            batches[library.name] = make(library)
        except Unsupported as error:
            problem = str(error)
        problem = job.problem(problem)
        if problem is not None:
            batches.pop(library.name, None)
            if library.name not in left_out:
                left_out.add(library.name)
                table.note(f"without {library.name}: {problem}")
    return batches


def close_libraries(libraries: Sequence[Library]) -> None:
    """Close all of them. All ranks call it."""
    for library in libraries:
        library.close()
