"""CUDA tensors over MPI: through pinned host memory, or by an MPI that takes device memory itself.

``ring`` has the pinned buffers and moves a tensor through them in pieces, ``lane`` keeps operations
in order, ``group`` and ``messages`` are the operations, ``aware`` finds out whether MPI takes
device memory, ``direct`` passes it the tensors themselves. All calls of CUDA are in
:mod:`hpcdist.backends.cuda`.
"""

from __future__ import annotations

from .group import StagedGroup

__all__ = ["StagedGroup"]
