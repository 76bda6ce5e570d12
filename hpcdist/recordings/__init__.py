"""The flight recorder's files: what each process called last, as other processes read it.

``read`` turns a file, of a live process or a dead one, into operations; ``frtrace`` turns those
into the form that ``torchfrtrace`` reads. Neither needs torch or MPI.
"""

from .ask import ask
from .frtrace import as_frtrace
from .model import Group, Operation, Recording, Site
from .read import find, folder_of_user, read
from .rows import rows_of

__all__ = [
    "Group",
    "Operation",
    "Recording",
    "Site",
    "as_frtrace",
    "ask",
    "find",
    "folder_of_user",
    "read",
    "rows_of",
]
