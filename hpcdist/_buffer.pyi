from typing import Any, TypedDict

class _Described(TypedDict):
    pointer: int
    elements: int
    dtype: str
    shape: tuple[int, ...]
    contiguous: bool

# Any: torch tensors, NumPy arrays, and whatever has the buffer protocol or DLPack on the host.
def describe(obj: Any) -> _Described: ...
