"""``hpcdist.spawn``: run a function on N ranks of this machine, from an ordinary program.

``api`` starts them, ``context`` waits for them and raises what they raised, ``child`` is what each
of them runs. The function and its arguments travel in a file that only this user can read.
"""

from .api import spawn
from .context import (
    ProcessContext,
    ProcessException,
    ProcessExitedException,
    ProcessRaisedException,
)

__all__ = [
    "ProcessContext",
    "ProcessException",
    "ProcessExitedException",
    "ProcessRaisedException",
    "spawn",
]
