"""parallel_assert and parallel_raises: all ranks fail when one does."""

import pytest
from cases import here

import hpcdist as dist
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks


def failure(call):
    """The text of the AssertionError that a call raises here, or None."""
    try:
        call()
    except AssertionError as exc:
        return str(exc)
    return None


def test_all_is_well():
    parallel_assert(True)
    parallel_assert([1])
    parallel_assert(lambda: True, lambda: 1 / 0)
    with parallel_raises(ValueError, match="number [0-9]") as caught:
        raise ValueError(f"number {dist.get_rank()}")
    assert str(caught.value) == f"number {dist.get_rank()}"
    with parallel_raises((KeyError, TypeError)):
        raise KeyError if dist.get_rank() else TypeError


@pytest.mark.parametrize("lazy", [False, True])
def test_one_rank_fails(lazy):
    rank, size = here()
    for bad in range(size):
        ok = rank != bad
        text = failure(
            lambda ok=ok: parallel_assert((lambda: ok) if lazy else ok, lambda: f"I am {rank}")
        )
        assert text is not None
        assert f"failed on 1 of {size} ranks" in text and f"rank {bad}: I am {bad}" in text
        assert text.count("I am") == 1
    text = failure(lambda: parallel_assert(False))
    assert f"failed on {size} of {size}" in text and "the condition is false" in text
    text = failure(lambda: parallel_assert(rank != size - 1, "plain text"))
    assert f"rank {size - 1}: plain text" in text


def test_an_error_in_the_condition_is_a_failure():
    rank, size = here()

    def condition():
        if rank == 0:
            raise KeyError("missing")
        return True

    try:
        parallel_assert(condition)
    except AssertionError as exc:
        error = exc
    assert "rank 0: KeyError: 'missing'" in str(error)
    assert isinstance(error.__cause__, KeyError) == (rank == 0)


def test_what_pytest_raises_is_a_failure_too():
    """``pytest.fail`` and its like raise what is no Exception."""
    rank, size = here()

    def condition():
        with pytest.raises(ValueError):
            if rank:
                raise ValueError
        return True

    def expect(outcome):
        with parallel_raises(ValueError):
            if rank == 0:
                outcome("not here")
            raise ValueError

    for call, said in (
        (lambda: parallel_assert(condition), "Failed: DID NOT RAISE"),
        (lambda: expect(pytest.fail), "Failed was raised instead of ValueError: not here"),
        (lambda: expect(pytest.skip), "Skipped was raised instead of ValueError"),
    ):
        text = failure(call)
        assert f"failed on 1 of {size} ranks" in text and f"rank 0: {said}" in text, text


def test_raises_on_some_ranks_only():
    rank, size = here()
    bad = size - 1

    def expect(error, match=None):
        with parallel_raises(ValueError, match=match):
            if error is not None:
                raise error

    text = failure(lambda: expect(None if rank == bad else ValueError("x")))
    assert f"rank {bad}: ValueError was not raised" in text and f"1 of {size}" in text
    text = failure(lambda: expect(KeyError("k") if rank == bad else ValueError("x")))
    assert f"rank {bad}: KeyError was raised instead of ValueError: 'k'" in text
    text = failure(lambda: expect(ValueError("y" if rank == bad else "x"), "x"))
    assert f"rank {bad}: the text of ValueError does not match 'x': y" in text
    assert failure(lambda: expect(ValueError("x"), "x")) is None


def test_interrupts_pass_through():
    for error in (KeyboardInterrupt, SystemExit):
        with pytest.raises(error):
            with parallel_raises(ValueError):
                raise error
    with parallel_raises(SystemExit):  # unless expected
        raise SystemExit(3)


def test_in_a_group():
    rank, size = here()
    group = dist.new_group([0])
    if rank == 0:
        parallel_assert(True, group=group)
        text = failure(lambda: parallel_assert(False, "alone", group))
        assert "1 of 1" in text and "rank 0: alone" in text
    else:
        with pytest.raises(ValueError, match="outside"):
            parallel_assert(True, group=group)
    dist.barrier()
    if rank == 0:
        dist.destroy_process_group(group)
