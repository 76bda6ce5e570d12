"""Which MPI an extra on the installer's command line names."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from places import ROOT

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]

sys.path.insert(0, str(ROOT / "_build"))

from hpcdist_build import target  # noqa: E402


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (["pip", "install", ".[mpich]"], "mpich"),
        (["pip", "install", "-e", ".[test, OpenMPI]"], "openmpi"),
        (["pip", "install", "{root}[mpich,test]"], "mpich"),
        (["pip", "install", "hpcdist[mpich]==0.1.0"], "mpich"),
        (["pip", "install", "dist/hpcdist-0.1.0.tar.gz[mpich]"], "mpich"),
        (["pip", "install", "."], None),
        (["pip", "install", ".[test]"], None),
        (["pip", "install", ".[openmpi,mpich]"], None),
        (["pip", "install", "mpi4py[mpich]", "."], None),
        (["sh", "-c", "pip install '.[mpich]' && true"], None),
    ],
)
def test_the_extra_is_read_from_a_command_line(words, extra):
    words = [word.format(root=ROOT) for word in words]
    assert target.extra_in(words, str(ROOT), ROOT) == extra


def test_the_extra_is_read_from_the_installer_above():
    ask = "from hpcdist_build.target import requested_extra; print(requested_extra())"
    installer = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    run = subprocess.run(
        [sys.executable, "-c", installer, ask, "install", ".[mpich]"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "_build")},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert run.stdout.strip() == "mpich"
