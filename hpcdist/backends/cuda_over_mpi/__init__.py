"""CUDA tensors over MPI: through pinned host memory, or by an MPI that takes device memory itself.

``pinned`` moves a tensor through pinned buffers in pieces, ``lane`` keeps operations in order,
``device_tensor`` describes what is moved, ``group`` and ``messages`` are the operations, ``aware``
finds out whether MPI takes device memory, ``direct`` passes it the tensors themselves. All calls of
CUDA are in :mod:`hpcdist.backends.cuda`.
"""

from __future__ import annotations

from .group import StagedGroup

__all__ = ["StagedGroup"]
