from types import TracebackType
from typing import Any, TypedDict

class _Described(TypedDict):
    pointer: int
    elements: int
    dtype: str
    shape: tuple[int, ...]
    contiguous: bool

# Any: torch tensors, NumPy arrays, and whatever has the buffer protocol or DLPack on the host.
def describe(obj: Any) -> _Described: ...
def limit() -> float: ...
def unreadable(obj: Any) -> str | None: ...

class limited:
    def __init__(self, seconds: float) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
