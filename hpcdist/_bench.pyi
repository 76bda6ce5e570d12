from typing import final

@final
class Loop:
    def __new__(cls, handle: int) -> Loop: ...
    def free(self) -> None: ...
    def collective(
        self,
        name: str,
        send: int,
        recv: int,
        count: int,
        dtype: int,
        op: int,
        root: int,
        calls: int,
    ) -> None: ...
    def nonblocking(
        self,
        name: str,
        send: int,
        recv: int,
        count: int,
        dtype: int,
        op: int,
        root: int,
        calls: int,
    ) -> None: ...
    def ping_pong(
        self, send: int, recv: int, count: int, dtype: int, peer: int, begins: bool, calls: int
    ) -> None: ...
    def stream(
        self, address: int, count: int, dtype: int, peer: int, sends: bool, window: int, calls: int
    ) -> None: ...

def copy(send: int, recv: int, size: int, calls: int) -> None: ...
def combine(
    send: int,
    recv: int,
    count: int,
    blocks: int,
    dtype: int,
    op: int,
    back: bool,
    calls: int,
) -> None: ...
