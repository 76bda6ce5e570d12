"""What the future of a communication hook holds: gradients, or what is refused as such."""

from __future__ import annotations

from typing import Any

import torch

from hpcdist._buffer import unreadable
from hpcdist.parallel.reducer.copies import deliver


def gradients_in(value: Any, buffer: torch.Tensor) -> torch.Tensor:
    """Take the tensor out of the value of a hook's future.

    Parameters
    ----------
    value : object
        A tensor, or a list of one, as the future of a Work of torch's holds it.
    buffer : torch.Tensor
        The bucket's, for which the gradients are.

    Returns
    -------
    torch.Tensor
        The gradients: as many elements as `buffer` has, or sparse as it is. Local.

    Raises
    ------
    TypeError
        If it holds no gradients for that buffer.
    """
    if isinstance(value, (list, tuple)) and len(value) == 1:
        (value,) = value
    if (
        not isinstance(value, torch.Tensor)
        or (value.is_sparse and not buffer.is_sparse)
        or (not value.is_sparse and _numbers(value) != _numbers(buffer))
    ):
        raise TypeError(
            "the future of a communication hook must hold one tensor of as many elements as "
            f"the bucket has ({buffer.numel()} of {buffer.dtype}), not {_shape(value)}"
        )
    if not value.dtype.is_floating_point and not value.dtype.is_complex:
        raise TypeError(
            "the future of a communication hook must hold gradients, floating-point or complex "
            f"numbers, not {value.dtype}"
        )
    if value.is_meta:
        raise TypeError("the future of a communication hook holds a meta tensor, without data")
    why = None if value.is_sparse else unreadable(value)
    if why:
        raise TypeError(f"the future of a communication hook holds a tensor that {why}")
    return value


def deliver_gradients(value: Any, buffer: torch.Tensor) -> None:
    """Copy the gradients in the value of a hook's future into the bucket's buffer."""
    deliver(gradients_in(value, buffer), buffer)


def _numbers(tensor: torch.Tensor) -> int:
    """Count real numbers."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def _shape(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        kind = "a sparse tensor" if value.is_sparse else "a tensor"
        return f"{kind} of shape {tuple(value.shape)} and {value.dtype}"
    return type(value).__name__
