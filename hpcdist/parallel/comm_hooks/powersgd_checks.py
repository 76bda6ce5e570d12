"""Checks what a PowerSGD state is made from: options, and what an earlier state has saved."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hpcdist.groups.numbers import real, steps, whole, yes_or_no

#: Words in the state of NumPy's Mersenne Twister, and the largest position in them.
_WORDS = 624


def options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options as numbers and booleans of Python's types.

    Raises
    ------
    TypeError
        If one is no number, or no whole one where that is needed, or a flag is not a boolean.
    ValueError
        If one is not a number (NaN), too small, or infinite where that has no meaning.
    """
    found = dict(given)
    for name in ("use_error_feedback", "warm_start", "batch_tensors_with_same_shape"):
        found[name] = yes_or_no(given[name], name)
    rank = whole(given["matrix_approximation_rank"], "matrix_approximation_rank")
    start = steps(given["start_powerSGD_iter"], "start_powerSGD_iter")
    frequency = "compression_stats_logging_frequency"
    found[frequency] = max(1, steps(given[frequency], frequency))
    if rank < 1:
        raise ValueError(f"matrix_approximation_rank must be 1 or more, not {rank}")
    if (found["use_error_feedback"] or found["warm_start"]) and start <= 1:
        raise ValueError(
            f"start_powerSGD_iter must be 2 or more, not {start}, with "
            "use_error_feedback or warm_start: DDP rebuilds its buckets after the first step, "
            "and the state belongs to a bucket"
        )
    found.update(matrix_approximation_rank=rank, start_powerSGD_iter=start)
    for name in ("min_compression_rate", "orthogonalization_epsilon"):
        found[name] = real(given[name], name)
    epsilon = found["orthogonalization_epsilon"]
    if not 0 <= epsilon < math.inf:  # infinite: all gradients would be zero
        raise ValueError(f"orthogonalization_epsilon must be finite and 0 or more, not {epsilon}")
    return found


def counter(value: Any, name: str) -> float:
    """Return a saved counter.

    Raises
    ------
    TypeError
        If it is no whole number.
    ValueError
        If it is negative, or infinite: only the step of the next report may be (no more reports).
    """
    number = steps(value, name)
    if number < 0:
        raise ValueError(f"{name} must be 0 or more, not {number}")
    if number == math.inf and name != "next_stats_report":
        raise ValueError(f"{name} must be finite: it counts what has been done")
    return number


def memory(given: Any, name: str) -> dict[int, torch.Tensor]:
    """Return copies of the saved tensors by bucket or parameter.

    Raises
    ------
    TypeError
        If it is no dict of numbers and tensors.
    """
    found = {}
    for number, tensor in _items(given, name):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must contain tensors, not {type(tensor).__name__}")
        found[number] = tensor.clone()
    return found


def layouts(given: Any, name: str) -> dict[int, list[list[int]]]:
    """Return the saved layouts by bucket: numbers of parameters, and of elements.

    Raises
    ------
    TypeError
        If they are none.
    ValueError
        If a number is negative.
    """
    found = {}
    for bucket, layout in _items(given, name):
        if not isinstance(layout, (list, tuple)) or not all(
            isinstance(part, (list, tuple)) and len(part) == 2 for part in layout
        ):
            raise TypeError(f"{name} must contain lists of pairs, not {layout!r}")
        found[bucket] = [[whole(number, name) for number in part] for part in layout]
        if any(number < 0 for part in found[bucket] for number in part):
            raise ValueError(f"{name} must contain numbers of 0 or more, not {layout!r}")
    return found


def random_numbers(given: Any) -> np.random.RandomState:
    """Return NumPy's generator in a saved state.

    Raises
    ------
    TypeError, ValueError
        If it is none. NumPy itself would read beyond the words from a wrong position.
    """
    if not isinstance(given, (list, tuple)) or len(given) != 5:
        raise TypeError(f"rng must be a list of five, not {type(given).__name__}")
    kind, keys, position, has_gauss, gauss = given
    keys = [whole(key, "a word of rng") for key in keys]
    position = whole(position, "the position of rng")
    if not 0 <= position <= _WORDS or len(keys) != _WORDS or not all(0 <= k < 2**32 for k in keys):
        raise ValueError(f"rng must have {_WORDS} words of 32 bits, and a position among them")
    generator = np.random.RandomState()
    words = np.array(keys, np.uint32)
    generator.set_state((kind, words, position, whole(has_gauss, "rng"), real(gauss, "rng")))
    return generator


def _items(given: Any, name: str) -> list[tuple[int, Any]]:
    if not isinstance(given, Mapping):
        raise TypeError(f"{name} must be a dict, not {type(given).__name__}")
    return [(whole(key, f"a key of {name}"), value) for key, value in given.items()]
