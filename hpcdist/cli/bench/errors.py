"""Errors that end a bench, or leave out a library."""

from __future__ import annotations


class BenchError(Exception):
    """A fault that every rank finds in the same way, such as arguments that contradict each other.

    It must be raised on all ranks. The command prints it once and ends with status 2.
    """


class Unsupported(Exception):
    """A library does not offer an operation, or not with these arguments; the text says why."""
