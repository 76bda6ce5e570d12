"""What the loops of the floor read and write."""

from __future__ import annotations

import pytest
import torch

from hpcdist.cli.bench import floor
from hpcdist.cli.bench.errors import Unsupported
from hpcdist.cli.bench.operations import OPERATIONS, Case
from hpcdist.dtypes import lookup

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]


class Recorded:
    """Stands in for the native loops: elements read and written by one call."""

    def __init__(self):
        self.seen = None

    def copy(self, send, recv, size, calls):
        assert send != recv
        self.seen = size // 4, size // 4

    def combine(self, send, recv, count, blocks, dtype, op, back, calls):
        self.seen = count * blocks, count * (blocks if back else 1)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_rank_moves_its_share(ranks, monkeypatch):
    """In parts of the operation's N elements, of which there is one per rank."""
    recorded = Recorded()
    monkeypatch.setattr(floor, "_bench", recorded)
    n = ranks
    expected = {
        "all_reduce": (n, n), "reduce": (n, 1), "reduce_scatter_tensor": (n, 1),
        "broadcast": (n - 1, n - 1), "all_gather": (n, n), "all_gather_into_tensor": (n, n),
        "all_to_all_single": (n, n), "gather": (1, 1), "scatter": (1, 1),
    }  # fmt: skip
    part = 25
    for name, operation in OPERATIONS.items():
        redop = "SUM" if operation.reduces else "none"
        case = Case(operation, part * n * 4, lookup("float32"), redop, 0, 0, n)
        if name == "barrier":
            with pytest.raises(Unsupported):
                floor.Floor().batch(case)
            continue
        floor.Floor().batch(case)(1)
        assert recorded.seen == tuple(part * k for k in expected[name]), name


def test_the_loops_move_all_elements():
    from hpcdist import _bench
    from hpcdist._ops import ReduceOp

    code, add, count = lookup("float32").code, ReduceOp.SUM.code, 10_001
    blocks = torch.arange(3 * count, dtype=torch.float32) % 17
    out, total = torch.zeros(count), blocks.view(3, count).sum(0)
    _bench.combine(blocks.data_ptr(), out.data_ptr(), count, 3, code, add, False, 2)
    assert torch.equal(out, total)
    _bench.combine(blocks.data_ptr(), blocks.data_ptr(), count, 3, code, add, True, 1)
    assert torch.equal(blocks.view(3, count), total.expand(3, count))
    copied = torch.zeros(count)
    _bench.copy(out.data_ptr(), copied.data_ptr(), count * 4 - 4, 1)
    assert torch.equal(copied[:-1], out[:-1]) and copied[-1] == 0
    with pytest.raises(ValueError, match="no such operation"):
        _bench.combine(out.data_ptr(), out.data_ptr(), 1, 1, code, ReduceOp.BXOR.code, False, 1)
