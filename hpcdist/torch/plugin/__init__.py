"""The entry point under ``torch.backends``, which torch loads where hpcdist is installed.

It makes the backend "hpcdist" and the init method ``mpi://`` known to torch.distributed, and
imports hpcdist when one of them is used. So ``import torch`` costs nothing more, starts no MPI and
needs none. setup.py installs it beside hpcdist, as ``hpcdist_torch_plugin``: importing any part of
hpcdist loads libmpi. With ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` torch leaves it out;
``import hpcdist.torch`` does the same.

With the variable HPCDIST_TAKE_OVER, torch's own backends become hpcdist's: ``take_over.py``.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from typing import Any

__all__ = ["register"]


def register() -> None:
    """Register hpcdist with torch.distributed; torch calls it at the end of its import.

    A torch to which hpcdist is unknown must stay usable: an exception here would end
    ``import torch`` in every program of this environment.
    """
    import torch.distributed as dist

    if not dist.is_available():  # torch was built without it
        return
    try:
        if not hasattr(dist.Backend, "HPCDIST"):
            devices = ["cpu", "cuda"]
            dist.Backend.register_backend("hpcdist", _create, extended_api=True, devices=devices)
        with contextlib.suppress(RuntimeError):  # it is registered already
            dist.register_rendezvous_handler("mpi", _meet)
    except Exception as error:
        warnings.warn(
            f"torch does not know the backend 'hpcdist' ({type(error).__name__}: {error}); import "
            "hpcdist.torch says more, and TORCH_DEVICE_BACKEND_AUTOLOAD=0 ends this warning",
            stacklevel=2,
        )
    if os.environ.get("HPCDIST_TAKE_OVER"):
        from . import take_over

        take_over.install(take_over.names())


def _create(options: Any, pg_options: Any = None) -> Any:
    import hpcdist.torch

    return hpcdist.torch.backend.create(options, pg_options)


def _meet(url: str, **arguments: Any) -> Iterator[tuple[Any, int, int]]:
    import hpcdist.torch

    return hpcdist.torch.rendezvous.meet(url, **arguments)
