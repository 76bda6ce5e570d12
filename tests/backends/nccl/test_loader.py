"""How libnccl.so.2 is found; each case in a process of its own, because the library stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import standin

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]

PROGRAM = """
import json, sys
import hpcdist
from hpcdist import _nccl_loader
before = _nccl_loader.is_loaded() is None and "libnccl" not in open("/proc/self/maps").read()
{first}
try:
    found = _nccl_loader.load()
    again = _nccl_loader.load() is found
    print(json.dumps([before, again, found.path, found.version, found.found, found.optional]))
except hpcdist.DistBackendError as error:
    print(json.dumps([before, str(error)]))
"""


def look(first: str = "", *path: str, **env: str) -> list:
    full = {name: value for name, value in os.environ.items() if not name.startswith("NCCL_")}
    full.pop("HPCDIST_NCCL_LIBRARY", None)
    if path:
        full["PYTHONPATH"] = os.pathsep.join([*path, full.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(first=first)],
        env=full | env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_file_that_is_named():
    path = standin.build()
    before, again, *found = look(HPCDIST_NCCL_LIBRARY=path)
    assert before and again, "importing hpcdist loads nothing, and load() is for once"
    assert found[:3] == [path, 22809, "HPCDIST_NCCL_LIBRARY"]
    assert set(found[3]) == {
        "mem_alloc", "comm_register", "init_rank_scalable", "shrink", "window_register", "revoke",
        "all_to_all", "gather", "scatter",
    }  # fmt: skip


def test_one_that_is_loaded_already():
    path = standin.build()
    _, _, *found = look(f"import ctypes; ctypes.CDLL({path!r})")
    assert found[:3] == [path, 22809, "already loaded"]


def test_the_one_of_a_wheel(tmp_path):
    place = tmp_path / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    place.parent.mkdir(parents=True)
    place.symlink_to(standin.build("STANDIN_OLD"))
    _, _, *found = look("", str(tmp_path))
    assert found == [str(place), 21805, "wheel", []]


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"HPCDIST_NCCL_LIBRARY": "/nowhere/libnccl.so.2"}, "HPCDIST_NCCL_LIBRARY: /nowhere"),
        ({"HPCDIST_NCCL_LIBRARY": "libm.so.6"}, "has no ncclGetErrorString"),
        ({"NCCL_STANDIN_VERSION": "21704", "HPCDIST_NCCL_LIBRARY": ""}, "is NCCL 2.17.4"),
    ],
    ids=["no file", "another library", "too old"],
)
def test_what_cannot_serve_is_refused(env, said):
    if not env.get("HPCDIST_NCCL_LIBRARY"):
        env = env | {"HPCDIST_NCCL_LIBRARY": standin.build()}
    before, error = look(**env)
    assert before
    assert said in error
    assert "there is no NCCL to use" in error and "HPCDIST_NCCL_LIBRARY" in error


def test_version_text():
    from hpcdist._nccl_loader import version_text

    assert [version_text(each) for each in (2708, 20905, 21805, 22809, 23203)] == [
        "2.7.8", "2.9.5", "2.18.5", "2.28.9", "2.32.3",
    ]  # fmt: skip
