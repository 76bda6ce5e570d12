"""What the tests of the stores share."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def folder():
    """A folder in memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
        yield Path(made)
