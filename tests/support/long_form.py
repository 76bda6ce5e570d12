"""Short and long forms of one test: tests/reliability.py asks for the long ones.

CI runs a small number of cases of what tests/reliability.py runs thousands of. Both are the same
test, so that the short form cannot rot.
"""

from __future__ import annotations

import os

import pytest

#: Whether this is the long form.
LONG = os.environ.get("HPCDIST_TEST_LONG") == "1"


def size(short: int, long: int) -> int:
    """How many cases to run."""
    return long if LONG else short


def deadline(short: float, *, long: float) -> pytest.MarkDecorator:
    """The test's deadline in seconds."""
    return pytest.mark.deadline(long if LONG else short)
