"""``hpcdist.spawn``: run a function on N ranks of this machine, from an ordinary program.

``api`` starts the processes, ``context`` waits for them and raises what they raised, ``child`` runs
in each of them. The function and its arguments travel in a file that only this user can read.
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
