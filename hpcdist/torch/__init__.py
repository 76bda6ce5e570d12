"""hpcdist for stock torch.distributed: ``import hpcdist.torch`` and torch's own DDP, FSDP2, DTensor
and the rest run over MPI, with an unmodified PyTorch.

>>> import hpcdist.torch
>>> hpcdist.torch.init_process_group()  # or torch.distributed.init_process_group("hpcdist", "mpi://")
"""

from __future__ import annotations

from hpcdist._torch_version import explain
from hpcdist.torch import compat

compat.check()

with explain():
    from hpcdist.torch import (
        arguments,
        backend,
        base,
        buckets,
        delegate,
        elsewhere,
        flight_recorder,
        functional,
        hooks,
        join,
        joining,
        modules,
        process_group,
        ranges,
        reconfigure,
        rendezvous,
        window,
        work,
    )
    from hpcdist.torch.backend import group, to_torch
    from hpcdist.torch.flight_recorder import dump_flight_recorder
    from hpcdist.torch.rendezvous import init_process_group

    backend.register()
    rendezvous.register()
    functional.register()
    join.register()
    joining.register()
    reconfigure.register()
    for _module in (
        base,
        buckets,
        process_group,
        arguments,
        delegate,
        elsewhere,
        functional,
        hooks,
        joining,
        modules,
        ranges,
        reconfigure,
        window,
        work,
        flight_recorder,
    ):
        compat.hide_from_compiler(_module)

__all__ = ["dump_flight_recorder", "group", "init_process_group", "to_torch"]
