"""What the build passes to the compiler."""

from __future__ import annotations

import sys

import pytest
from places import ROOT

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]

sys.path.insert(0, str(ROOT / "_build"))

from hpcdist_build import extensions  # noqa: E402


def test_the_environments_own_headers_are_left_out(monkeypatch, tmp_path):
    """In a virtual environment with an MPI wheel its mpi.h came before that of the chosen mpicc."""
    from setuptools import Distribution

    monkeypatch.setattr(sys, "exec_prefix", str(tmp_path))
    command = extensions.BuildExt(Distribution())
    command.finalize_options()
    assert command.include_dirs and str(tmp_path / "include") not in command.include_dirs
