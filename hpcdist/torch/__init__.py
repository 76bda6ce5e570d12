"""hpcdist for stock torch.distributed: ``import hpcdist.torch`` and torch's own DDP, FSDP2, DTensor
and the rest run over MPI, with an unmodified PyTorch.

>>> import hpcdist.torch
>>> hpcdist.torch.init_process_group()  # or torch.distributed.init_process_group("hpcdist", "mpi://")
"""

from __future__ import annotations

from hpcdist.torch import backend as _backend
from hpcdist.torch import rendezvous as _rendezvous
from hpcdist.torch.backend import group, to_torch
from hpcdist.torch.rendezvous import init_process_group

__all__ = ["group", "init_process_group", "to_torch"]

_backend.register()
_rendezvous.register()
