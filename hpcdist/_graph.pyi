from collections.abc import Callable

from torch import Tensor
from torch.autograd.graph import Node

def leaves(todo: list[Node], accumulate: type) -> dict[int, Node]: ...

class GradientHook:
    def __init__(self, call: Callable[[int, Tensor], None], index: int) -> None: ...
    def __call__(self, parameter: Tensor) -> None: ...
