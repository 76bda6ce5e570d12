"""What PowerSGDState loads: only what a state has saved, and else an error that changes nothing."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from hpcdist.elastic.parts import part_of
from hpcdist.parallel.comm_hooks import PostLocalSGDState, PowerSGDState

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]

#: Option -> a wrong value, and the error.
OPTIONS = [
    ("matrix_approximation_rank", -1, ValueError),
    ("matrix_approximation_rank", 0, ValueError),
    ("matrix_approximation_rank", 1.5, TypeError),
    ("matrix_approximation_rank", "1", TypeError),
    ("start_powerSGD_iter", 1, ValueError),
    ("start_powerSGD_iter", "10", TypeError),
    ("start_powerSGD_iter", math.nan, TypeError),
    ("min_compression_rate", math.nan, ValueError),
    ("min_compression_rate", "2", TypeError),
    ("orthogonalization_epsilon", math.nan, ValueError),
    ("orthogonalization_epsilon", None, TypeError),
    ("orthogonalization_epsilon", math.inf, ValueError),
    ("orthogonalization_epsilon", -1e-8, ValueError),
    ("compression_stats_logging_frequency", "often", TypeError),
    ("use_error_feedback", "False", TypeError),
    ("warm_start", None, TypeError),
    ("warm_start", 2, TypeError),
    ("batch_tensors_with_same_shape", "no", TypeError),
    ("batch_tensors_with_same_shape", torch.ones(2), TypeError),
]
RNG = PowerSGDState(None).state_dict()["rng"]
MEMORY: list[tuple[str, Any, type[Exception]]] = [
    ("iter", -1, ValueError),
    ("iter", 0.5, TypeError),
    ("iter", math.inf, ValueError),
    ("iter", math.nan, TypeError),
    ("total_numel_after_compression", math.inf, ValueError),
    ("total_numel_before_compression", "0", TypeError),
    ("next_stats_report", math.nan, TypeError),
    ("error_dict", [torch.ones(2)], TypeError),
    ("error_dict", {0: [1.0]}, TypeError),
    ("q_memory_dict", {"0": torch.ones(2)}, TypeError),
    ("q_layout", {0: [3, 4]}, TypeError),
    ("error_layout", {0: [[0, -4]]}, ValueError),
    ("error_layout", None, TypeError),
    ("rng", None, TypeError),
    ("rng", [*RNG[:2], 700, *RNG[3:]], ValueError),  # NumPy reads behind its words there
    ("rng", [*RNG[:2], -1, *RNG[3:]], ValueError),
    ("rng", [RNG[0], RNG[1][:-1], *RNG[2:]], ValueError),
    ("rng", [RNG[0], [-1, *RNG[1][1:]], *RNG[2:]], ValueError),
    ("rng", ["PCG64", *RNG[1:]], ValueError),
]


@pytest.mark.parametrize(("name", "value", "error"), [*OPTIONS, *MEMORY])
def test_a_wrong_entry_is_an_error_and_changes_nothing(
    name: str, value: Any, error: type[Exception]
) -> None:
    state = PowerSGDState(None, 3, random_seed=5)
    before = copy.deepcopy(state.state_dict())
    wrong = {**PowerSGDState(None, 2).state_dict(), name: value}
    with pytest.raises(error):
        state.load_state_dict(wrong)
    assert state.state_dict() == before


@pytest.mark.parametrize(("name", "value", "error"), OPTIONS)
def test_the_constructor_raises_the_same(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        PowerSGDState(None, **{name: value})


def test_what_a_state_has_saved_is_loaded() -> None:
    saved = PowerSGDState(
        None, 2, math.inf, random_seed=7, compression_stats_logging_frequency=math.inf
    )
    saved.iter, saved.next_stats_report = 4, math.inf
    saved.error_dict[0], saved.error_layout[0] = torch.ones(1), [[0, 1]]
    saved.rng.randn(3)
    for loaded in (PowerSGDState(None), pickle.loads(pickle.dumps(saved))):
        loaded.load_state_dict(saved.state_dict())
        assert loaded.state_dict() == saved.state_dict()
        assert loaded.rng.randn() == copy.deepcopy(saved.rng).randn()


def test_booleans_of_other_types_are_taken() -> None:
    state = PowerSGDState(None, use_error_feedback=np.False_, warm_start=0)  # type: ignore[arg-type]
    assert (state.use_error_feedback, state.warm_start) == (False, False)
    assert PowerSGDState(None, warm_start=np.int8(1)).warm_start is True  # type: ignore[arg-type]


def test_post_local_sgd_takes_booleans_only() -> None:
    with pytest.raises(TypeError, match="post_local_gradient_allreduce must be True or False"):
        PostLocalSGDState(None, None, 3, "False")  # type: ignore[arg-type]


def test_post_local_sgd_goes_back_to_a_step() -> None:
    """An elastic State could not take it."""
    state = PostLocalSGDState(None, None, 3, False)
    part = part_of(state, "hook")
    state.iter = 2
    taken = part.take()
    state.iter = 4
    part.restore(taken)
    assert state.iter == 2
    for wrong in ({}, {"iter": 1, "other": 2}, {"iter": -1}, {"iter": 1.5}):
        with pytest.raises((TypeError, ValueError)):
            state.load_state_dict(wrong)
    assert state.iter == 2
