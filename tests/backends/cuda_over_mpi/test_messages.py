"""Messages of CUDA tensors over MPI beside a user's own, of the same ranks and tags."""

from __future__ import annotations

import itertools

import pytest
import torch
from over_mpi import CHUNK
from standin import cpu, gpu

import hpcdist as dist
from hpcdist.testing import parallel_assert

pytestmark = [pytest.mark.standin, pytest.mark.usefixtures("over_mpi"), pytest.mark.mpi(min_size=2)]


def test_a_users_message_is_never_taken_for_a_part_of_a_long_one():
    """Of whatever type, tag and length: the parts of a long tensor are of kinds of their own."""
    rank, group = dist.get_rank(), dist.new_group()
    kinds = (torch.float8_e8m0fnu, torch.float8_e5m2fnuz)
    sizes = (40, 32, CHUNK)
    n = 3 * CHUNK // 4 + 5
    wrong = []
    users = [
        torch.full((size,), number + 1, dtype=torch.uint8).view(kind)
        for number, (kind, size) in enumerate(itertools.product(kinds, sizes))
    ]
    if rank == 1:  # the first number of a long message of this group is 0, as the tag
        works = [dist.isend(each, 0, group, 0) for each in users]
        works.append(dist.isend(gpu(torch.arange(n, dtype=torch.float32)), 0, group, 0))
        dist.barrier(group)
        for work in works:
            work.wait()
    else:
        dist.barrier(group)
    if rank == 0:
        dist.recv(out := gpu(torch.zeros(n)), 1, group, 0)
        if not torch.equal(cpu(out), torch.arange(n, dtype=torch.float32)):
            wrong.append("the long one")
        for number, each in enumerate(users):
            dist.recv(here := torch.empty_like(each), 1, group, 0)
            if not torch.equal(here.view(torch.uint8), each.view(torch.uint8)):
                wrong.append(number)
    parallel_assert(not wrong, lambda: str(wrong))
    dist.destroy_process_group(group)


def test_a_long_and_a_short_tensor_do_not_match():
    """Whoever receives is told, whichever of the two is the long one."""
    rank, group = dist.get_rank(), dist.new_group()
    for sent, wanted in ((5, 5000), (5000, 5)):
        work = None
        if rank == 1:
            work = dist.isend(gpu(torch.ones(sent)), 0, group, 3)
        dist.barrier(group)
        text = ""
        if rank == 0:
            try:
                dist.recv(gpu(torch.ones(wanted)), 1, group, 3)
            except dist.DistMismatchError as error:
                text = str(error)
            dist.recv(gpu(torch.ones(sent)), 1, group, 3)
        if work is not None:
            work.wait()
        parallel_assert(rank != 0 or "rank 1 sent" in text, lambda text=text: text)
    dist.destroy_process_group(group)
