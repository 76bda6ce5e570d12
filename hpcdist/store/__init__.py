"""Key-value stores, through which processes find each other before they can communicate.

The names, signatures and semantics of torch.distributed's stores, with errors where those hang or
lose data: see ``docs/stores.md``. Importing this needs neither torch nor MPI.
"""

from .auth import new_key
from .base import Store
from .file import FileStore
from .hash import HashStore
from .prefix import PrefixStore
from .tcp import TCPStore

__all__ = ["FileStore", "HashStore", "PrefixStore", "Store", "TCPStore", "new_key"]
