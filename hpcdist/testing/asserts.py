"""Assertions that fail on all ranks together."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from hpcdist import _engine
from hpcdist._ops import ReduceOp
from hpcdist.backends.dispatch import agreeing
from hpcdist.backends.refusal import refusing_parts
from hpcdist.collectives.objects import all_gather_object
from hpcdist.groups.resolve import resolve
from hpcdist.groups.state import ProcessGroup
from hpcdist.groups.world import NonMember

E = TypeVar("E", bound=BaseException)

#: What ends a program, or a generator. What else is no Exception may be an outcome of pytest's.
_ENDS = (KeyboardInterrupt, SystemExit, GeneratorExit)


def last_words(fd: int | None = None) -> None:
    """Send what hpcdist says before it ends the job to a file descriptor as well as to stderr.

    pytest captures stderr into a file that is gone with the process. Call this in
    ``pytest_configure`` of a ``conftest.py``, where stderr is not captured yet. Local to this
    process.

    Parameters
    ----------
    fd : int, optional
        A descriptor that stays open, -1 for none; the default is a copy of what stderr is now.
    """
    _engine.abort_tell(os.dup(2) if fd is None else fd)


def _fail_together(
    api: str, problem: str | None, group: ProcessGroup | None, cause: BaseException | None
) -> None:
    """Raise AssertionError on all ranks of the group when there is a problem on any."""
    __tracebackhide__ = True
    pg = resolve(group)
    if isinstance(pg, NonMember):
        raise ValueError(f"{api} was called outside the given group")
    comm = pg.carrier
    count = np.array([problem is not None], np.int64)
    problems: list[str | None] = [None] * comm.size
    with refusing_parts(agreeing(comm), api, lambda: 3 if count[0] else 1):
        comm.all_reduce(count, ReduceOp.SUM, api=api)
        if not count[0]:
            return
        all_gather_object(problems, problem, pg)
    lines = [f"  rank {rank}: {text}" for rank, text in enumerate(problems) if text is not None]
    failed = AssertionError(
        f"{api} failed on {len(lines)} of {comm.size} ranks of group {pg.name!r}:\n"
        + "\n".join(lines)
    )
    raise failed from cause


def parallel_assert(
    condition: Any,
    message: str | Callable[[], str] | None = None,
    group: ProcessGroup | None = None,
) -> None:
    """Assert something on all ranks of a group, and fail on all of them when one fails.

    All ranks of the group must call it.

    Parameters
    ----------
    condition : object or callable
        What must be true. A callable is called without arguments; an exception in it counts as a
        failure of this rank and is reported with the others, also if ``pytest.raises``,
        ``pytest.fail`` or ``pytest.skip`` raise it. ``KeyboardInterrupt`` and ``SystemExit`` pass.
    message : str or callable, optional
        Text of this rank for the report. A callable is called only on failure.
    group : ProcessGroup, optional
        None means the default group.

    Raises
    ------
    AssertionError
        On every rank, listing the ranks whose condition was false and their messages.

    Examples
    --------
    >>> parallel_assert(torch.equal(t, expected), lambda: f"{t} is not {expected}")

    Notes
    -----
    One all-reduce of eight bytes when all is well. Source: mpi4py-based test suites such as
    Firedrake's have a function of this name; this one also carries the messages.
    """
    __tracebackhide__ = True
    problem, cause = None, None
    try:
        if not (condition() if callable(condition) else condition):
            problem = message() if callable(message) else message
            problem = "the condition is false" if problem is None else str(problem)
    except _ENDS:
        raise
    except BaseException as exc:
        problem, cause = f"{type(exc).__name__}: {exc}", exc
    _fail_together("parallel_assert", problem, group, cause)


class parallel_raises:
    """Expect an exception on every rank of a group, and fail on all when one has none.

    All ranks of the group must enter and leave it. The group must be usable at its end: expect an
    error that breaks a group with another `group` than the broken one.

    Parameters
    ----------
    exc : type or tuple of types
        The exception that must be raised inside.
    match : str, optional
        Regular expression that must be found in its text (``re.search``).
    group : ProcessGroup, optional
        The ranks that decide together. None means the default group.

    Attributes
    ----------
    value : BaseException or None
        The exception of this rank, after the block.

    Raises
    ------
    AssertionError
        On every rank, listing the ranks that raised nothing, something else or another text.

    Examples
    --------
    >>> with parallel_raises(TypeError, match="float8"):
    ...     hpcdist.all_reduce(tensor)

    Notes
    -----
    ``KeyboardInterrupt`` and ``SystemExit`` pass through at once unless they are expected. Source:
    hpcdist; the shape is ``pytest.raises``.
    """

    def __init__(
        self,
        exc: type[E] | tuple[type[E], ...],
        match: str | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        self.expected = exc
        self.match = match
        self.group = group
        self.value: BaseException | None = None

    def __enter__(self) -> parallel_raises:
        return self

    def _problem(self, error: BaseException | None) -> str | None:
        names = self.expected if isinstance(self.expected, tuple) else (self.expected,)
        wanted = " or ".join(cls.__name__ for cls in names)
        if error is None:
            return f"{wanted} was not raised"
        if not isinstance(error, self.expected):
            return f"{type(error).__name__} was raised instead of {wanted}: {error}"
        if self.match is not None and not re.search(self.match, str(error)):
            return f"the text of {type(error).__name__} does not match {self.match!r}: {error}"
        return None

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        __tracebackhide__ = True
        problem = self._problem(exc)
        if problem is not None and isinstance(exc, _ENDS):
            return False
        self.value = exc
        _fail_together("parallel_raises", problem, self.group, exc)
        return True
