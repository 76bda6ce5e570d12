"""Builds of one source tree at the same time."""

from __future__ import annotations

import subprocess
import sys

import pytest
from places import ROOT

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]

BUILDS = """
import sys, time
sys.path.insert(0, sys.argv[1])
from hpcdist_build import backend, lock

def build(*_):
    with lock.one_build():  # as build_ext does, inside of it
        pass
    print("begins", flush=True)
    time.sleep(0.5)
    print("ends", flush=True)
    return "name"

backend._setuptools.build_wheel = backend._setuptools.build_editable = build
assert getattr(backend, sys.argv[2])("folder") == "name"
"""


def test_builds_of_one_tree_take_turns(tmp_path):
    """One removed the native modules of another before they were packed."""
    with (tmp_path / "log").open("w+") as log:
        started = [
            subprocess.Popen(
                [sys.executable, "-c", BUILDS, str(ROOT / "_build"), name],
                cwd=tmp_path, stdout=log, stderr=subprocess.PIPE, text=True,
            )
            for name in ("build_wheel", "build_editable", "build_wheel")
        ]  # fmt: skip
        errors = [process.communicate(timeout=50)[1] for process in started]
        assert [process.returncode for process in started] == [0] * 3, errors
        log.seek(0)
        assert log.read().split() == ["begins", "ends"] * 3
