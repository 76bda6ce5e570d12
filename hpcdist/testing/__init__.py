"""Help for tests that run on several ranks at once.

A bare ``assert`` that fails on one rank leaves the others waiting in their next collective. The
functions here decide together: :func:`parallel_assert` and :func:`parallel_raises` fail on all
ranks when they fail on one, and name it. :class:`deadline` ends a test that hangs anyway, with
the stacks of every rank. :func:`last_words` lets what hpcdist says when it ends the job past a
capture of stderr.
"""

from .asserts import last_words, parallel_assert, parallel_raises
from .deadline import EXIT_CODE, deadline

__all__ = ["EXIT_CODE", "deadline", "last_words", "parallel_assert", "parallel_raises"]
