"""Differentiable collectives: against one process that computes what all ranks compute."""

from __future__ import annotations

import functools
from datetime import timedelta

import pytest
import torch
from gloo import gloo, gloo_world
from torch.autograd import Function, gradcheck, gradgradcheck

import hpcdist as dist
from hpcdist.nn import functional as F
from hpcdist.testing import parallel_assert, parallel_raises

pytestmark = pytest.mark.ranks


class Part(Function):
    """Of a tensor that is the same on all ranks, this rank's row; the transpose of Whole."""

    @staticmethod
    def forward(ctx, whole):
        return whole[dist.get_rank()].clone()

    @staticmethod
    def backward(ctx, gradient):
        return Whole.apply(gradient)


class Whole(Function):
    """All ranks' rows as one tensor that is the same on all ranks; the transpose of Part."""

    @staticmethod
    def forward(ctx, part):
        out = part.new_empty(dist.get_world_size(), *part.shape)
        dist.all_gather_into_tensor(out, part.contiguous())
        return out

    @staticmethod
    def backward(ctx, gradient):
        return Part.apply(gradient)


def empty(*shape, dtype=torch.float64):
    return torch.full(shape, float("nan"), dtype=dtype)


def splits(rows):
    """How many rows rank r sends to rank s: uneven, and some of them none."""
    return [[(r + 2 * s + 1) % 3 for s in range(rows)] for r in range(rows)]


def only(rank, value):
    """A value on one rank, and zeros on the others."""
    zeros = torch.zeros_like(value)
    return torch.stack([value if r == rank else zeros for r in range(dist.get_world_size())])


def every(value):
    return torch.stack([value] * dist.get_world_size())


def calls():
    """Name -> (columns of this rank's row, the call with it, what all rows of results must be)."""
    return {**reducing_calls(), **moving_calls(), **uneven_calls()}


def reducing_calls():
    n = dist.get_world_size()
    last = n - 1
    reductions = {
        "SUM": (dist.ReduceOp.SUM, lambda x: x.sum(0)),
        "AVG": (dist.ReduceOp.AVG, lambda x: x.mean(0)),
        "PREMUL_SUM": (dist.ReduceOp.PREMUL_SUM(0.75), lambda x: 0.75 * x.sum(0)),
        "MIN": (dist.ReduceOp.MIN, lambda x: x.amin(0)),
        "MAX": (dist.ReduceOp.MAX, lambda x: x.amax(0)),
        "PRODUCT": (dist.ReduceOp.PRODUCT, lambda x: x.prod(0)),
    }
    found = {}
    for name, (op, reduced) in reductions.items():
        found[f"all_reduce {name}"] = (
            2, lambda x, op=op: F.all_reduce(x, op), lambda x, f=reduced: every(f(x)),
        )  # fmt: skip
        found[f"reduce {name}"] = (
            2, lambda x, op=op: F.reduce(x, last, op), lambda x, f=reduced: only(last, f(x)),
        )  # fmt: skip
        found[f"reduce_scatter {name}"] = (
            2 * n,
            lambda x, op=op: F.reduce_scatter(empty(2), x.view(n, 2).unbind(0), op),
            lambda x, f=reduced: f(x).view(n, 2),
        )
        found[f"reduce_scatter_single {name}"] = (
            2 * n,
            lambda x, op=op: F.reduce_scatter_single(empty(2), x, op),
            lambda x, f=reduced: f(x).view(n, 2),
        )
    return found


def moving_calls():
    n = dist.get_world_size()
    last, found = n - 1, {}
    found["broadcast"] = (2, lambda x: F.broadcast(x, last), lambda x: every(x[last]))
    found["gather"] = (2, lambda x: torch.stack(F.gather(x, last)), lambda x: only(last, x))
    found["scatter"] = (
        2 * n, lambda x: F.scatter(x.view(n, 2).unbind(0), last), lambda x: x[last].view(n, 2),
    )  # fmt: skip
    found["all_gather"] = (2, lambda x: torch.stack(F.all_gather(x)), every)
    found["all_gather_single"] = (2, lambda x: F.all_gather_single(empty(n, 2), x), every)
    found["all_to_all"] = (
        2 * n,
        lambda x: torch.stack(F.all_to_all([empty(2) for _ in range(n)], x.view(n, 2).unbind(0))),
        lambda x: x.view(n, n, 2).transpose(0, 1),
    )
    found["all_to_all_single"] = (
        2 * n,
        lambda x: F.all_to_all_single(empty(n, 2), x.view(n, 2)),
        lambda x: x.view(n, n, 2).transpose(0, 1),
    )
    return found


def uneven_calls():
    n, me = dist.get_world_size(), dist.get_rank()
    table, found = splits(n), {}
    most = max(sum(row) for row in table)
    arrive = [sum(table[r][s] for r in range(n)) for s in range(n)]
    found["reduce_scatter uneven"] = (
        n * (n + 1) // 2,
        lambda x: torch.nn.functional.pad(
            F.reduce_scatter(empty(me + 1), x.split(list(range(1, n + 1)))), (0, n - me - 1)
        ),
        lambda x: torch.stack(
            [
                torch.nn.functional.pad(part, (0, n - len(part)))
                for part in x.sum(0).split(list(range(1, n + 1)))
            ]
        ),
    )
    wide = max(arrive)
    found["all_to_all_single uneven"] = (
        most,
        lambda x: torch.nn.functional.pad(
            F.all_to_all_single(
                empty(arrive[me]),
                x[: sum(table[me])],
                [table[r][me] for r in range(n)],
                table[me],
            ),
            (0, wide - arrive[me]),
        ),
        lambda x: torch.stack(
            [
                torch.nn.functional.pad(
                    torch.cat([x[r, sum(table[r][:s]) :][: table[r][s]] for r in range(n)]),
                    (0, wide - arrive[s]),
                )
                for s in range(n)
            ]
        ),
    )
    return found


NAMES = [
    *(
        f"{call} {op}"
        for op in ("SUM", "AVG", "PREMUL_SUM", "MIN", "MAX", "PRODUCT")
        for call in ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_single")
    ),
    "reduce_scatter uneven", "broadcast", "gather", "scatter", "all_gather", "all_gather_single",
    "all_to_all", "all_to_all_single", "all_to_all_single uneven",
]  # fmt: skip


def test_all_cases_have_a_name():
    assert sorted(NAMES) == sorted(calls())


@pytest.mark.parametrize("name", NAMES)
def test_values_gradients_and_second_derivatives(rng, name):
    columns, call, reference = calls()[name]
    whole = torch.from_numpy(rng.standard_normal((dist.get_world_size(), columns)))
    whole.requires_grad_()

    def collective(x):
        return Whole.apply(call(Part.apply(x)))

    weight = torch.from_numpy(rng.standard_normal(reference(whole).shape))
    results, gradients = [], []
    for function in (collective, reference):
        result = function(whole)
        # Not linear, so that second derivatives are not zero.
        (first,) = torch.autograd.grad((result.square() * weight).sum(), whole, create_graph=True)
        second = torch.autograd.grad(first.square().sum(), whole)[0]
        results.append(result.detach())
        gradients.append((first.detach(), second))
    parallel_assert(torch.allclose(*results), lambda: f"values: {results}")
    for one, other in zip(*gradients, strict=True):
        parallel_assert(torch.allclose(one, other), lambda one=one, other=other: f"{one}\n{other}")


@pytest.mark.parametrize(
    "name",
    ["all_reduce AVG", "all_reduce MAX", "all_reduce PRODUCT", "reduce SUM", "reduce_scatter SUM",
     "broadcast", "gather", "scatter", "all_gather", "all_to_all", "all_to_all_single uneven"],
)  # fmt: skip
def test_gradcheck(rng, name):
    columns, call, _ = calls()[name]
    whole = torch.from_numpy(rng.standard_normal((dist.get_world_size(), columns)))
    whole.requires_grad_()
    torch.manual_seed(0)  # gradgradcheck draws

    def collective(x):
        return Whole.apply(call(Part.apply(x)))

    parallel_assert(
        gradcheck(collective, (whole,), fast_mode=True)
        and gradgradcheck(collective, (whole,), fast_mode=True)
    )


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_gradients_are_those_of_torch_over_gloo(rng):
    gloo_world()
    from torch.distributed.nn import functional as theirs

    n, last = dist.get_world_size(), dist.get_world_size() - 1
    zeros = functools.partial(torch.zeros, dtype=torch.float64)  # gloo adds in another order

    def both(f, op):
        return {
            "all_reduce": lambda x: f.all_reduce(x[0], op.SUM),
            "broadcast": lambda x: f.broadcast(x[0], last),
            "all_gather": lambda x: torch.cat(f.all_gather(x[0])),
            "gather": lambda x: torch.cat(f.gather(x[0], last)),
            "scatter": lambda x: f.scatter(list(x.unbind(0)), last),
            # What the other ranks get of a reduction is undefined there.
            "reduce": lambda x: f.reduce(x[0], last, op.SUM) * (dist.get_rank() == last),
            "all_to_all": lambda x: torch.cat(
                f.all_to_all([zeros(3) for _ in range(n)], list(x.unbind(0)))
            ),
            "all_to_all_single": lambda x: f.all_to_all_single(zeros(n, 3), x),
        }

    pairs = both(F, dist.ReduceOp), both(theirs, gloo.ReduceOp)
    data = [torch.from_numpy(rng.standard_normal((n, 3))) for _ in range(n)]
    for name in pairs[0]:
        found = []
        for functions in pairs:
            tensor = data[dist.get_rank()].clone().requires_grad_()
            result = functions[name](tensor)
            (result.square().sum() * (1 + dist.get_rank())).backward()
            found.append((result.detach(), tensor.grad))
        same = all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*found, strict=True))
        parallel_assert(same, lambda name=name, found=found: f"{name}: {found}")


def test_ties_share_the_gradient_and_nan_counts_as_the_extreme():
    size, me = dist.get_world_size(), dist.get_rank()
    tied = torch.tensor([1.0, float(me), float("nan") if me == 0 else 5.0], requires_grad=True)
    F.all_reduce(tied, dist.ReduceOp.MAX).sum().backward()
    # Each rank's sum counts, so a holder gets the sum of the gradients of all of them.
    wanted = [1.0, size * float(me == size - 1), size * float(me == 0)]
    parallel_assert(tied.grad.tolist() == wanted, lambda: f"{tied.grad} is not {wanted}")


def test_product_with_a_zero_keeps_its_gradient():
    me = dist.get_rank()
    tensor = torch.tensor([0.0 if me == 0 else 2.0], requires_grad=True)
    F.all_reduce(tensor, dist.ReduceOp.PRODUCT).sum().backward()
    size = dist.get_world_size()
    others = 2.0 ** (size - 1) if me == 0 else 0.0
    parallel_assert(tensor.grad.item() == size * others)


def test_strided_input_dtypes_and_groups(rng):
    size, me = dist.get_world_size(), dist.get_rank()
    columns = torch.from_numpy(rng.standard_normal((3, 4))).t().requires_grad_()
    total = F.all_reduce(columns)
    total[::2].sum().backward()  # an expanded gradient, sliced
    parallel_assert(torch.allclose(total, columns * size) and columns.grad[1].eq(0).all())
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        tensor = torch.ones(3, dtype=dtype, requires_grad=True)
        F.all_reduce(tensor, dist.ReduceOp.AVG).sum().abs().backward()
        parallel_assert(tensor.grad.dtype == dtype and torch.allclose(tensor.grad, tensor.detach()))
    group = dist.new_group([size - 1, 0] if size > 1 else [0], sort_ranks=False)
    if me in (0, size - 1):
        tensor = torch.full((2,), float(me), requires_grad=True)
        got = F.broadcast(tensor, size - 1, group)
        got.sum().backward()
        fine = got.tolist() == [size - 1.0] * 2
        fine &= tensor.grad[0].item() == (min(size, 2) if me == size - 1 else 0)
    else:
        fine = True
    parallel_assert(fine)
    dist.destroy_process_group(group) if me in (0, size - 1) else None


def test_errors_name_what_is_wrong():
    size = dist.get_world_size()
    tensor = torch.ones(2, requires_grad=True)
    with parallel_raises(ValueError, match="one tensor for each of the"):
        F.scatter([tensor] * (size + 1))
    with parallel_raises(ValueError, match="must have one shape"):
        F.scatter([torch.ones(i + (i == 0) * (size + 1)) for i in range(size)] if size > 1
                  else _no_shape())  # fmt: skip
    with parallel_raises(TypeError, match="BAND"):
        F.all_reduce(tensor.detach(), dist.ReduceOp.BAND)
    with parallel_raises(ValueError, match="no derivative"):
        F.all_reduce(tensor, dist.ReduceOp.BAND)
    with parallel_raises(ValueError, match="not in the group"):
        F.broadcast(tensor, size)


def _no_shape():
    raise ValueError("with one rank tensors must have one shape")


@pytest.mark.mpi(min_size=2)
def test_a_rank_whose_input_needs_no_gradient_is_an_error_not_a_hang():
    group = dist.new_group()
    tensor = torch.ones(2, requires_grad=dist.get_rank() != 0)
    total = F.all_reduce(tensor, group=group).sum()
    group.timeout = timedelta(seconds=1)
    problem = None
    try:
        if dist.get_rank():
            total.backward()
    except dist.DistTimeoutError as error:
        problem = str(error)
    parallel_assert(dist.get_rank() == 0 or "rank 0" in str(problem), lambda: f"{problem}")
    dist.destroy_process_group(group)


CONJUGATED = {
    "all_reduce": lambda x: F.all_reduce(x),
    "reduce": lambda x: F.reduce(x, 0),
    "reduce_scatter": lambda x: F.reduce_scatter(torch.empty_like(x[0]), [*x]),
    "reduce_scatter_single": lambda x: F.reduce_scatter_single(torch.empty_like(x[0]), x),
    "broadcast": lambda x: F.broadcast(x, 0),
    "gather": lambda x: torch.stack(F.gather(x)),
    "scatter": lambda x: F.scatter([*x]),
    "all_gather": lambda x: torch.stack(F.all_gather(x)),
    "all_gather_single": lambda x: F.all_gather_single(empty(len(x), *x.shape, dtype=x.dtype), x),
    "all_to_all": lambda x: torch.stack(F.all_to_all([torch.empty_like(y) for y in x], [*x])),
    "all_to_all_single": lambda x: F.all_to_all_single(torch.empty_like(x), x),
}


@pytest.mark.parametrize("name", CONJUGATED)
def test_lazily_conjugated_and_negated_views(rng, name):
    """Autograd hands such gradients to backward, where no caller can resolve them."""
    rows, call = dist.get_world_size(), CONJUGATED[name]
    numbers = torch.from_numpy(rng.standard_normal((3, 64))).view(torch.complex128)
    drawn = numbers.reshape(-1)[: 3 * rows].view(rows, 3) + dist.get_rank()
    for lazy in (lambda t: t.conj(), lambda t: t.conj().imag):
        found = []
        for resolve in (False, True):
            x = drawn.clone().requires_grad_()
            given = lazy(x).resolve_conj().resolve_neg() if resolve else lazy(x)
            result = call(given)
            seed = torch.full(result.shape, 2 + 3j, dtype=torch.complex128)
            gradient = lazy(seed).resolve_conj().resolve_neg() if resolve else lazy(seed)
            result.backward(gradient)
            found.append((result.detach(), x.grad))
        same = all(torch.equal(a, b) for a, b in zip(*found, strict=True))
        parallel_assert(same, lambda found=found: f"{found}")
