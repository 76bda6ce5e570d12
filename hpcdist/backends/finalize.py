"""What comes before mpi4py's ``MPI.Finalize``: hpcdist's threads leave MPI.

hpcdist also hears of MPI_Finalize from MPI itself, but MPICH stops locking before it says so, and
threads that are inside MPI then crash it. Source: MPICH's ``MPII_Finalize``.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from hpcdist import _engine

NAME = "mpi4py.MPI"


def prepare() -> None:
    """Let a later ``MPI.Finalize()`` of mpi4py wait for operations in flight while MPI is whole.

    It may be imported already, or later. A second call does nothing.
    """
    module = sys.modules.get(NAME)
    if module is not None:
        _wrap(module)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _wrap(module: ModuleType) -> None:
    finalize = module.Finalize
    if hasattr(finalize, "__wrapped__"):
        return

    @functools.wraps(finalize)
    def leave_first() -> None:
        _engine.leave_mpi()
        finalize()

    module.Finalize = leave_first  # type: ignore[attr-defined]


class _Finder:
    """Finds mpi4py.MPI as the other finders do, once, and wraps it when it has been imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != NAME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader: Any = spec and spec.loader
        if loader is not None:
            execute = loader.exec_module

            def execute_and_wrap(module: ModuleType) -> None:
                execute(module)
                _wrap(module)

            loader.exec_module = execute_and_wrap
        return spec
