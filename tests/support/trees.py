"""Compare two trees of results, of tensors and plain values in lists, tuples and dicts."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["compare"]


def compare(one: Any, other: Any, where: str = "") -> None:
    """Fail where two trees of results differ.

    Parameters
    ----------
    one, other
        hpcdist's results, and gloo's.
    where : str
        The path to them, for the message: keys and indices. Floats may differ by 1e-6, under a key
        that begins with "half " by 1e-3, because float16 holds three digits.
    """
    assert type(one) is type(other), f"{where}: {one!r} where gloo has {other!r}"
    if isinstance(one, dict):
        assert list(one) == list(other), f"{where}: {list(one)} where gloo has {list(other)}"
        for key in one:
            compare(one[key], other[key], f"{where} {key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), f"{where}: {one!r} where gloo has {other!r}"
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            compare(left, right, f"{where} {index}")
    elif isinstance(one, torch.Tensor):
        limit = 1e-3 if "half " in where else 1e-6
        torch.testing.assert_close(
            one, other, rtol=limit, atol=limit, equal_nan=True, msg=lambda m: f"{where}: {m}"
        )
    else:
        assert one == other, f"{where}: {one!r} where gloo has {other!r}"
