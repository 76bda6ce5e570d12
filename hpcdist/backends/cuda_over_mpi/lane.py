"""Runs operations in order: on the caller's thread if it waits anyway, else on another."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from hpcdist import _buffer, log
from hpcdist._nccl import StreamWork
from hpcdist.errors import DistBackendError, DistError, DistTimeoutError, forked_error

_log = log.get_logger("staging")

#: Seconds that a lane's thread waits for the next operation before it ends.
LINGER = 2.0
#: Lanes that are kept though they are idle.
MANY = 64


def refuse_forked(pid: int) -> None:
    """Raise in a process that was forked from the one of that number: its threads are not here."""
    if os.getpid() != pid:
        raise forked_error("MPI")


class StagedJob:
    """One operation: a function that returns the event after which its results are there."""

    def __init__(self, run: Callable[[], Any], what: str) -> None:
        self._run: Callable[[], Any] | None = run
        self.what = what
        self.pid = os.getpid()
        self._limit = _buffer.limit()  # the call's, on whatever thread it runs
        self.done = threading.Event()
        self.taken = False  # by a lane: it runs, or will
        self.lane: StagingLane | None = None  # the one whose thread runs it
        self.event: Any = None
        self.error: BaseException | None = None
        self.seen = False
        self._lock = threading.RLock()
        self._callbacks: list[Callable[[], None]] = []

    def run(self) -> None:
        """Run it on the current thread, and wake the waiters; its callbacks are called apart."""
        try:
            self.taken = True
            assert self._run is not None
            with _buffer.limited(self._limit):
                self.event = self._run()
        except BaseException as error:
            self.error = error
        self._run = None
        with self._lock:
            self.done.set()

    @property
    def calls_back(self) -> bool:
        """Whether a function waits for its end."""
        return bool(self._callbacks)

    def call_back(self) -> None:
        """Call the functions that wait for its end."""
        with self._lock:
            callbacks, self._callbacks = self._callbacks, []
        for call in callbacks:
            call()

    def __del__(self) -> None:
        if self.error is not None and not self.seen and self.pid == os.getpid():
            _log.error("%s failed and was never waited for: %s", self.what, self.error)

    def when_done(self, call: Callable[[], None]) -> None:
        """Call a function when it is over; at once if it is."""
        with self._lock:
            if not self.done.is_set():
                self._callbacks.append(call)
                return
        call()


class StagingLane:
    """A queue of jobs, and a thread for jobs that no caller runs inline."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._waiting: deque[StagedJob] = deque()
        self._busy = False
        self._inline = 0  # the thread that runs a job for itself, or 0
        self._thread: threading.Thread | None = None
        self._calling: set[int] = set()  # the threads in callbacks of jobs that are over

    def start(self, job: StagedJob) -> None:
        """Append a job to the queue; the lane's thread runs it."""
        job.lane = self
        with self._changed:
            self._append(job)

    def prepare(self) -> None:
        """Start the thread that jobs will need, if there is none: what fails, fails before them."""
        with self._changed:
            if self._thread is None:
                self._provide()

    def refuse_in_handler(self, what: str) -> None:
        """Raise in a signal handler that runs while this thread runs a job itself."""
        if self._inline == threading.get_ident():
            raise DistError(
                f"a signal handler called {what} while this thread is in another operation that "
                "comes first: it could only begin after the handler has returned. Set a flag in "
                "the handler and look at it after the operation, or use a group of its own in the "
                "handler"
            )

    def call(self, job: StagedJob) -> None:
        """Run a job after those that are queued, and raise what it raises."""
        self.refuse_in_handler(job.what)
        me = threading.get_ident()
        try:
            with self._changed:
                if self._busy or self._waiting:
                    self._append(job)
                else:
                    self._busy, self._inline = True, me
            if self._inline == me:
                job.run()
        finally:  # whatever a handler raised, and wherever
            if self._inline == me:
                with self._changed:
                    self._busy, self._inline = False, 0
                    if self._waiting:
                        self._provide()
        while not job.done.wait(1.0):  # a wait without end would not see Ctrl-C everywhere
            pass
        job.seen = True
        if job.error is not None:
            raise job.error

    def _append(self, job: StagedJob) -> None:
        """Queue a job; after an exception it is not queued."""
        self._waiting.append(job)
        try:
            self._provide()
            job.taken = True
        except BaseException:
            if not job.taken:
                self._waiting.remove(job)
            raise

    def _provide(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise DistBackendError(
                    f"no thread could be started for an operation of CUDA tensors over MPI "
                    f"({error}): too many threads or processes, see ulimit -u and the job's "
                    "limits; operations that wait at once need none"
                ) from error
            self._thread = thread  # not before: the next operation tries again
        self._changed.notify_all()

    def _serve(self) -> None:
        while True:
            with self._changed:
                until = time.monotonic() + LINGER
                while self._busy or not self._waiting:
                    left = until - time.monotonic()
                    if not self._waiting and left <= 0:
                        self._thread = None
                        return
                    self._changed.wait(None if self._waiting else left)
                job = self._waiting.popleft()
                self._busy = True
            job.run()
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                calls_back = job.calls_back
                if calls_back:
                    self._step_aside()
            if calls_back and not self._call_back(job):
                return
            del job  # and with it the tensors

    def _step_aside(self) -> None:
        """Let another thread serve: a callback may wait for the operations that come next."""
        self._thread = None
        self._calling.add(threading.get_ident())
        if self._waiting:
            with suppress(DistBackendError):  # without a thread they come after the callback
                self._provide()

    def _call_back(self, job: StagedJob) -> bool:
        """Call a job's callbacks; return whether this thread is to serve again."""
        try:
            job.call_back()
        finally:
            with self._changed:
                self._calling.discard(threading.get_ident())
                self._changed.notify_all()
        with self._changed:
            if self._thread is not None:
                return False
            self._thread = threading.current_thread()
            return True

    def idle(self, until: float) -> bool:
        """Wait until nothing is left, or a time of ``time.monotonic`` has come.

        A callback that calls this does not wait for itself.
        """
        me = {threading.get_ident()}

        def over() -> bool:
            return not (self._busy or self._waiting or self._calling - me)

        with self._changed:
            return self._changed.wait_for(over, max(until - time.monotonic(), 0.0))


class StagingLanes:
    """One lane per key: operations of one key run in order, others do not wait.

    Lanes are made at the first operation, and forgotten when there are many and they are idle: a
    program may give every message a tag of its own.

    Parameters
    ----------
    name : str
        Of their threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.RLock()
        self._made: dict[Hashable, StagingLane] = {}
        self._users: Counter[Hashable] = Counter()
        self._most = MANY

    @contextmanager
    def use(self, key: Hashable) -> Iterator[StagingLane]:
        """Use the lane of a key; it is not forgotten meanwhile."""
        with self._lock:
            if len(self._made) >= self._most:
                self._forget()
            lane = self._made.get(key)
            if lane is None:
                lane = self._made[key] = StagingLane(self._name)
            self._users[key] += 1
        try:
            yield lane
        finally:
            with self._lock:
                self._users[key] -= 1

    def _forget(self) -> None:
        self._made = {
            key: lane for key, lane in self._made.items() if self._users[key] or not lane.idle(0.0)
        }
        self._users = +self._users  # without the zeros
        self._most = max(MANY, 2 * len(self._made))

    def __iter__(self) -> Iterator[StagingLane]:
        with self._lock:
            return iter(list(self._made.values()))

    def __len__(self) -> int:
        return len(self._made)


class StagedWork(StreamWork):
    """An operation of a CUDA tensor over MPI.

    Parameters
    ----------
    runtime : object
        Of :mod:`hpcdist.backends.cuda`.
    index : int
        The device.
    begun_on : int
        Handle of the stream that was the caller's then.
    job : StagedJob
        The operation.
    tensors : list
        What it touches: kept alive until it is over.
    outputs : list
        What it writes.
    source : list of int
        Where a receive stores its sender; empty for other operations.

    Notes
    -----
    Made by operations with ``async_op=True``. Source: ``torch.distributed.Work``.
    """

    def __init__(
        self,
        runtime: Any,
        index: int,
        begun_on: int,
        job: StagedJob,
        tensors: list[Any],
        outputs: list[Any],
        source: list[int],
    ) -> None:
        self._runtime = runtime
        self._index = index
        self._begun_on = begun_on
        self._job = job
        self._tensors = tensors
        self._outputs = list(outputs)
        self._source = source
        self._future: Any = None

    def _wait(self, seconds: float) -> None:
        """Wait for MPI, and let the caller's current stream wait for the last copy."""
        refuse_forked(self._job.pid)
        if self._job.lane is not None and not self._job.done.is_set():
            self._job.lane.refuse_in_handler("wait")
        end = None if seconds < 0 else time.monotonic() + seconds
        while not self._job.done.wait(1.0 if end is None else min(1.0, _left(end))):
            if end is not None and time.monotonic() >= end:
                raise DistTimeoutError(
                    f"wait({seconds:g} s) ended before {self._job.what} did; it goes on and can be "
                    "waited for again"
                )
        error = self.exception()
        if error is not None:
            raise error
        event = self._job.event
        if event is not None:
            current = self._runtime.current(self._index)
            self._runtime.order(current, event)
            # freed memory may be used again at once in the stream that it is from
            if self._runtime.handle(current) != self._begun_on and not self._runtime.reached(event):
                self._tensors = []  # the group keeps them
                return
        self._tensors.clear()  # for the group, too, which holds them by this list

    def is_completed(self) -> bool:
        """Say whether the operation is over and its results are there."""
        refuse_forked(self._job.pid)
        if not self._job.done.is_set():
            return False
        event = self._job.event
        return event is None or bool(self._runtime.reached(event))

    def exception(self) -> Any:
        """Return the error of the operation, or None."""
        refuse_forked(self._job.pid)
        if not self._job.done.is_set():
            return None
        self._job.seen = True
        return self._job.error

    def result(self) -> list[Any]:
        """The tensors that the operation writes."""
        return list(self._outputs)

    def source_rank(self) -> int:
        """Group rank that a receive is from; -1 for other operations."""
        refuse_forked(self._job.pid)
        return self._source[0] if self._source and self._job.done.is_set() else -1

    def get_future(self) -> Any:
        """A ``torch.futures.Future`` of the tensors, completed when they hold the result."""
        refuse_forked(self._job.pid)
        if self._future is None:
            self._future = self._runtime.promise(self._index)
            self._job.when_done(self._complete)
        return self._future

    def _complete(self) -> None:
        self._job.seen = True
        try:
            if self._job.error is not None:
                self._future.set_exception(self._job.error)
                return
            if self._job.event is not None:
                self._runtime.reach(self._job.event)
            self._future.set_result(self.result())
        except Exception:  # of a user's callback
            import sys

            sys.excepthook(*sys.exc_info())


def _left(end: float) -> float:
    return max(end - time.monotonic(), 0.0)
