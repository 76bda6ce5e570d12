"""PowerSGD: gradients as products of two thin matrices.

A matrix M of gradients is sent as P and Q with M = P Q': P = M Q with the Q of the last step,
averaged and orthogonalised, and then Q = M' P, averaged. So each bucket makes two collectives that
depend on each other; see :class:`~hpcdist.parallel.comm_hooks._future.Pipeline` for how they
overlap with backward.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from hpcdist._engine import counting
from hpcdist._ops import ReduceOp
from hpcdist.parallel.comm_hooks._arguments import check_state, group_of
from hpcdist.parallel.comm_hooks._buckets import begins, dense_buffer
from hpcdist.parallel.comm_hooks._counting import count_left_out, counted
from hpcdist.parallel.comm_hooks._future import Stages
from hpcdist.parallel.comm_hooks.default import average
from hpcdist.parallel.comm_hooks.powersgd_feedback import Feedback, layout_of
from hpcdist.parallel.comm_hooks.powersgd_state import Layout, PowerSGDState
from hpcdist.parallel.comm_hooks.powersgd_undo import by_qr
from hpcdist.parallel.reducer.grad_bucket import GradBucket

API = counting("powerSGD_hook", "step")


def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the gradients, each matrix as a product of two thin ones.

    DDP calls it on all ranks, for each bucket.

    Parameters
    ----------
    state : PowerSGDState
        Settings and memory.
    bucket : GradBucket
        From DDP.

    Returns
    -------
    torch.futures.Future
        The approximate averages, the same bits on all ranks.

    Notes
    -----
    Source: ``torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook``, whose numbers it gives
    for the same seed; Vogels et al. 2019, arXiv:1905.13727.
    After a step in which a matrix was zero on all ranks, its Q is drawn again; with torch's
    hook all later averages of it are zero or NaN.
    """
    check_state(state, PowerSGDState, API)
    buffer = dense_buffer(bucket, API)
    if state.iter < state.start_powerSGD_iter:
        return counted(state, bucket, average(group_of(state.process_group), buffer, API))
    state._begin(bucket)
    count_left_out(state, bucket)
    feedback = Feedback(state, bucket)
    stages = _by_matrix(state, bucket, buffer, feedback)
    return state._pipeline.start(stages, begins(bucket)).then(feedback.settle)


def batched_powerSGD_hook(
    state: PowerSGDState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the gradients, each bucket as one square matrix that is a product of two thin ones.

    Faster than :func:`powerSGD_hook` and less precise, because neighbours in the square have
    nothing in common. DDP calls it on all ranks, for each bucket.

    Parameters
    ----------
    state : PowerSGDState
        Settings and memory; ``min_compression_rate`` and ``batch_tensors_with_same_shape`` mean
        nothing here.
    bucket : GradBucket
        From DDP.

    Returns
    -------
    torch.futures.Future
        The approximate averages, the same bits on all ranks.

    Notes
    -----
    Source: ``torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook.batched_powerSGD_hook``.
    """
    check_state(state, PowerSGDState, "batched_powerSGD_hook")
    buffer = dense_buffer(bucket, "batched_powerSGD_hook")
    if state.iter < state.start_powerSGD_iter:
        return counted(state, bucket, average(group_of(state.process_group), buffer, API))
    state._begin(bucket)
    count_left_out(state, bucket)
    feedback = Feedback(state, bucket)
    stages = _as_square(state, bucket, buffer, feedback)
    return state._pipeline.start(stages, begins(bucket)).then(feedback.settle)


def orthogonalize(matrices: torch.Tensor, epsilon: float = 0) -> None:
    """Make the columns of each matrix orthonormal, in place.

    Local.

    Parameters
    ----------
    matrices : torch.Tensor
        Shape ``(batch, rows, columns)``, no more columns than rows.
    epsilon : float
        Added to the norm of each column. With 0 a column of zeros stays zero.
    """
    columns = matrices.shape[2]
    if by_qr(matrices):
        matrices.copy_(torch.linalg.qr(matrices)[0])
        return
    for i in range(columns):
        column = matrices[:, :, i : i + 1]
        norm = torch.linalg.vector_norm(column, dim=1, keepdim=True)
        if epsilon:
            norm += epsilon
        else:
            norm = torch.where(norm == 0, torch.ones_like(norm), norm)
        column /= norm
        if i + 1 < columns:
            rest = matrices[:, :, i + 1 :]
            rest -= (column * rest).sum(1, keepdim=True) * column


def _averaged(state: PowerSGDState, tensor: torch.Tensor) -> Any:
    """Start to average a tensor over all ranks, in place.

    AVG divides float16 before the sum, which may be infinite where the average is not.
    """
    comm = group_of(state.process_group).carrier
    # a rank that has given up a pass which the others have counted forgets it alone
    return comm.all_reduce(tensor, ReduceOp.AVG, True, api=API, extra=state.iter)


def _memory(
    state: PowerSGDState, index: int, like: torch.Tensor, p_size: int, q_size: int, layout: Layout
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Return P and Q of a bucket, and whether Q must be redrawn."""
    p, q = state.p_memory_dict.get(index), state.q_memory_dict.get(index)
    state.q_layout[index] = layout
    if p is None:
        joined, whole = state._joined(state.q_pool, layout, like)
        if joined is not None and whole:
            p, q = like.new_empty(p_size), joined
            state.p_memory_dict[index], state.q_memory_dict[index] = p, q
    if (
        state.warm_start
        and p is not None
        and q is not None
        and (p.numel(), q.numel()) == (p_size, q_size)
        and p.dtype == q.dtype == like.dtype
    ):
        state._keep_q(index, q)
        return p, q, False
    state._keep_q(index, None)
    p, q = like.new_empty(p_size), like.new_empty(q_size)
    if state.warm_start:
        state.p_memory_dict[index], state.q_memory_dict[index] = p, q
    return p, q, True


def _batches(state: PowerSGDState, matrices: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Matrices by shape, in the order in which shapes first occur; or each alone."""
    by_shape: dict[torch.Size, list[torch.Tensor]] = {}
    for matrix in matrices:
        by_shape.setdefault(matrix.shape, []).append(matrix)
    if state.batch_tensors_with_same_shape:
        return list(by_shape.values())
    return [[matrix] for same in by_shape.values() for matrix in same]


def _real(bucket: GradBucket) -> list[torch.Tensor]:
    """The gradients; complex ones as real numbers, with a last dimension of size 2."""
    return [torch.view_as_real(g) if g.is_complex() else g for g in bucket.gradients()]


def _worth_it(state: PowerSGDState, parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Return whether a gradient is a matrix that compression makes small enough."""
    if parameter.dim() < 2 or not gradient.numel():
        return False
    rows, columns = gradient.shape[0], gradient.numel() // gradient.shape[0]
    rank = min(rows, columns, state.matrix_approximation_rank)
    return (rows + columns) * rank * state.min_compression_rate < rows * columns


def _divided(
    state: PowerSGDState, bucket: GradBucket, layout: Layout
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[int]]:
    """Return the gradients to compress, the others, and the numbers of the first ones."""
    large, small = [], []
    numbers: list[int] = []
    pairs = zip(bucket.parameters(), _real(bucket), strict=True)
    for place, (parameter, gradient) in enumerate(pairs):
        if _worth_it(state, parameter, gradient):
            large.append(gradient)
            numbers += [number for number, _ in layout[place : place + 1]]
        else:
            small.append(gradient)
    return large, small, numbers


def _by_matrix(
    state: PowerSGDState, bucket: GradBucket, buffer: torch.Tensor, feedback: Feedback
) -> Stages:
    index = bucket.index()
    layout = layout_of(bucket)
    state._follow(index, layout)
    feedback.add(buffer)
    large, small, numbers = _divided(state, bucket, layout)
    # A gradient that is not C-contiguous (channels last) is compressed from, and to, a copy.
    matrices = [gradient.reshape(gradient.shape[0], -1) for gradient in large]
    groups = _batches(state, matrices)
    batches = [same[0][None] if len(same) == 1 else torch.stack(same) for same in groups]
    ranks = [min(*b.shape[1:], state.matrix_approximation_rank) for b in batches]
    p_shapes = [(len(b), b.shape[1], r) for b, r in zip(batches, ranks, strict=True)]
    q_shapes = [(len(b), b.shape[2], r) for b, r in zip(batches, ranks, strict=True)]
    p_sizes, q_sizes = ([math.prod(shape) for shape in shapes] for shapes in (p_shapes, q_shapes))
    plain_sizes = [gradient.numel() for gradient in small]
    state._count(buffer.numel(), sum(p_sizes) + sum(q_sizes) + sum(plain_sizes))

    # What is not compressed travels with P, in one message.
    number_of = dict(zip(map(id, matrices), numbers, strict=False))
    order = [(matrix, rank) for same, rank in zip(groups, ranks, strict=True) for matrix in same]
    q_layout = [[number_of[id(m)], m.shape[1] * rank] for m, rank in order if number_of]
    first_memory, q_memory, fresh = _memory(
        state, index, buffer, sum(p_sizes) + sum(plain_sizes), sum(q_sizes), q_layout
    )
    p_memory, plain = first_memory.split([sum(p_sizes), sum(plain_sizes)])
    ps = list(map(torch.Tensor.view, p_memory.split(p_sizes), p_shapes))
    qs = list(map(torch.Tensor.view, q_memory.split(q_sizes), q_shapes))
    if fresh:
        state._draw(qs)
    for q in qs:
        orthogonalize(q, state.orthogonalization_epsilon)
    for batch, p, q in zip(batches, ps, qs, strict=True):
        torch.bmm(batch, q, out=p)
    for gradient, part in zip(small, plain.split(plain_sizes), strict=True):
        part.copy_(gradient.reshape(-1))
    yield _averaged(state, first_memory)
    state._see(first_memory)
    for gradient, part in zip(small, plain.split(plain_sizes), strict=True):
        gradient.copy_(part.view(gradient.shape))
    # torch adds the epsilon to the norm of the sum
    epsilon = state.orthogonalization_epsilon / group_of(state.process_group).size()
    for batch, p, q in zip(batches, ps, qs, strict=True):
        orthogonalize(p, epsilon)
        torch.bmm(batch.transpose(1, 2), p, out=q)
    if qs:
        yield _averaged(state, q_memory)
        state._see(q_memory)
        state._see_q(qs)
    for same, p, q in zip(groups, ps, qs, strict=True):
        for matrix, approximation in zip(same, torch.bmm(p, q.transpose(1, 2)), strict=True):
            matrix.copy_(approximation)
    for gradient, matrix in zip(large, matrices, strict=True):
        if matrix.data_ptr() != gradient.data_ptr():
            gradient.copy_(matrix.view(gradient.shape))
    feedback.sent(buffer)
    state.maybe_increase_iter(bucket)
    return buffer


def _as_square(
    state: PowerSGDState, bucket: GradBucket, buffer: torch.Tensor, feedback: Feedback
) -> Stages:
    index = bucket.index()
    count = buffer.numel()
    side = math.ceil(math.sqrt(count))
    rank = min(state.matrix_approximation_rank, side)
    state._count(count, 2 * side * rank)
    state._follow(index, layout_of(bucket))
    square = torch.nn.functional.pad(buffer, (0, side * side - count))
    feedback.add(square)
    matrix = square.view(1, side, side)
    p_memory, q_memory, fresh = _memory(state, index, buffer, side * rank, side * rank, [])
    p, q = p_memory.view(1, side, rank), q_memory.view(1, side, rank)
    if fresh:
        state._draw([q[0]])
    orthogonalize(q)
    torch.bmm(matrix, q, out=p)
    yield _averaged(state, p_memory)
    state._see(p_memory)
    orthogonalize(p)
    torch.bmm(matrix.transpose(1, 2), p, out=q)
    yield _averaged(state, q_memory)
    state._see(q_memory)
    state._see_q([q])
    torch.bmm(p, q.transpose(1, 2), out=matrix)
    feedback.sent(square)
    buffer.copy_(square[:count])
    state.maybe_increase_iter(bucket)
    return buffer
