"""Numbers on the command line."""

from __future__ import annotations

import argparse
import math

#: Seconds: more mean no limit, and would not fit into the clocks of the system.
_LONGEST = 1e9


def positive(text: str) -> int:
    """A whole number of at least 1; raises ArgumentTypeError if the text is none."""
    return _at_least(1, text)


def natural(text: str) -> int:
    """A whole number of at least 0; raises as :func:`positive`."""
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    try:
        number = int(text)
        if number < least:
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no whole number of at least {least}"
        ) from None
    return number


def seconds(text: str) -> float:
    """A time of more than 0, in seconds; raises as :func:`positive`."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return min(value, _LONGEST)
