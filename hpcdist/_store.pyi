from collections.abc import Sequence
from typing import Final, final

from typing_extensions import Buffer

SET: Final[int]
GET: Final[int]
ADD: Final[int]
EXCHANGE: Final[int]
CHECK: Final[int]
WAIT: Final[int]
DELETE: Final[int]
APPEND: Final[int]
PUSH: Final[int]
POP: Final[int]
LENGTH: Final[int]
BARRIER: Final[int]
COUNT: Final[int]
LIST: Final[int]
JOIN: Final[int]
JOINED: Final[int]

DONE: Final[int]
LATE: Final[int]
NO_NUMBER: Final[int]
OVERFLOW: Final[int]
FULL: Final[int]
EMPTY: Final[int]
SIZES: Final[int]
SENSELESS: Final[int]

KEY_SIZE: Final[int]

class LinkError(Exception):
    reason: str
    number: int
    def __init__(self, reason: str, number: int = 0) -> None: ...

def clock() -> int: ...
def mac(data: Buffer, key: Buffer, size: int, split: Sequence[int] = ()) -> bytes: ...

@final
class Server:
    def __init__(
        self,
        listeners: list[int],
        key: bytes,
        *,
        limit: int,
        handshake: float,
        message: float,
        idle: float,
        connections: int,
        strangers: int,
        world_size: int,
    ) -> None: ...
    @property
    def limit(self) -> int: ...
    def stats(self) -> dict[str, int]: ...
    def stop(self) -> None: ...

@final
class Link:
    def __init__(self, fd: int, key: bytes, deadline: int) -> None: ...
    @property
    def pid(self) -> int: ...
    @property
    def identity(self) -> bytes: ...
    def close(self) -> None: ...

@final
class Links:
    def __init__(self, most: int, fresh_ns: int) -> None: ...
    def keep(self, link: Link) -> None: ...
    def ask(
        self, op: int, items: tuple[str | bytes, ...], number: int, wait_ns: int, seconds: float
    ) -> tuple[int, int, list[bytes]] | None: ...
