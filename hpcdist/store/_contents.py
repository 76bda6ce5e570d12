"""The state that a FileStore's records describe: the keys, and who has the file open."""

from __future__ import annotations

import os
import socket

from hpcdist.errors import DistStoreError

from . import _journal as journal
from ._table import Table


def this_process() -> str:
    """Return the name of this process in the list of members."""
    return f"{socket.gethostname()}:{os.getpid()}"


class Contents:
    """The state of a file after some of its records."""

    def __init__(self) -> None:
        self.table = Table()
        #: id -> host and process
        self.members: dict[str, str] = {}
        #: Members that have ever joined.
        self.opened = 0

    def names(self) -> str:
        """Return the members' host and process, for errors."""
        names = sorted(self.members.values())
        return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")

    def apply(self, entry: journal.Entry) -> None:
        """Take the step that one entry of a record stands for."""
        kind, key, value = entry
        table = self.table
        if kind == journal.SET:
            table.values[key] = value
        elif kind == journal.DELETE:
            table.values.pop(key, None)
        elif kind == journal.TAIL:
            table.values[key] = table.values.get(key, b"") + value
        elif kind == journal.PUSH:
            table.push(key, value)
        elif kind == journal.POP:
            table.pop(key)
        elif kind == journal.ARRIVE:
            size, until, caller = journal.arrival(value)
            table.arrive(key, size, caller, until)
        elif kind == journal.LEAVE:
            table.drop(key, value.decode())
        elif kind == journal.OPEN:
            self.members[key] = value.decode("utf-8", "replace")
            self.opened += 1
        elif kind == journal.CLOSE:
            self.members.pop(key, None)
        else:
            raise DistStoreError(f"a record of the file is of an unknown kind {kind}")
