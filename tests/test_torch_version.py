"""The torch that is there: its number, and what an error of an untested one says."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch
from places import ROOT

import hpcdist
from hpcdist import _torch_version

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]


@pytest.mark.parametrize(
    ("text", "found"),
    [("2.10.0", (2, 10)), ("2.13.0+cpu", (2, 13)), ("2.14.0a0+git1b2c", (2, 14)), ("3.0", (3, 0))],
)
def test_versions(text: str, found: tuple[int, int]) -> None:
    assert _torch_version.version(text) == found


def test_errors_of_a_torch_that_is_too_new_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    explain = _torch_version.explain
    with pytest.raises(TypeError, match="^its own$"), explain():
        raise TypeError("its own")
    monkeypatch.setattr(torch, "__version__", "2.99.0+cpu")
    said = r"tested with torch 2\.10 to 2\.15, and this is 2\.99: .*failed: TypeError: its own"
    with pytest.raises(RuntimeError, match=said) as caught, explain():
        raise TypeError("its own")
    assert isinstance(caught.value.__cause__, TypeError)
    with pytest.raises(ImportError, match="failed: ImportError: gone"), explain():
        raise ImportError("gone")
    with pytest.raises(hpcdist.DistError, match="^ours$"), explain():
        raise hpcdist.DistError("ours")


def test_the_support_page_names_the_torch_that_the_tests_run_on() -> None:
    (minor,) = re.findall(r"^(\d+\.\d+)\.", torch.__version__)
    if _torch_version.version() > _torch_version.NEWEST:
        pytest.skip(f"torch {minor} is newer than those that hpcdist was run with")
    text = (ROOT / "docs" / "support.md").read_text()
    table = "".join(re.findall(r"^\| (\d+\.\d+\.\d+[^|]*)\|", text, re.M))
    assert minor in re.findall(r"(\d+\.\d+)\.\d+", table)


def test_the_oldest_torch_is_the_same_everywhere() -> None:
    known = (_torch_version.OLDEST, _torch_version.NEWEST)
    oldest, newest = (".".join(map(str, each)) for each in known)
    assert f'"torch>={oldest}"' in (ROOT / "pyproject.toml").read_text()
    assert f"PyTorch {oldest} to {newest}" in (ROOT / "README.md").read_text()


#: torch 2.99 without a private name: the name, what a program does, what it prints.
WITHOUT = {
    "torch.distributed.Backend.register_backend": ("plugin", "does not know the backend"),
    "torch._C._dynamo.eval_frame._FrameExecStrategy": ("bridge", "1.0"),
    "torch.distributed.ReduceOp": ("bridge", "ImportError hpcdist was tested with torch"),
    "torch._C._will_engine_execute_node": ("native", "RuntimeError hpcdist was tested with torch"),
    "torch.utils._pytree.tree_map_only": ("native", "ImportError hpcdist was tested with torch"),
}
PROGRAM = """
import os, sys
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import torch, torch.distributed as td, torch.utils._pytree

def lose(name):
    where, _, last = name.rpartition(".")
    if where not in sys.modules:  # a class
        module, _, where = where.rpartition(".")
        delattr(getattr(sys.modules[module], where), last)
    else:
        delattr(sys.modules[where], last)

def plugin():
    import hpcdist_torch_plugin
    hpcdist_torch_plugin.register()

def bridge():
    import hpcdist.torch
    hpcdist.torch.init_process_group()
    x = torch.ones(1)
    td.all_reduce(x)
    td.destroy_process_group()
    print(x.item())

def native():
    import hpcdist
    hpcdist.init_process_group()
    hpcdist.DistributedDataParallel

torch.__version__ = "2.99.0+cpu"
for row in sys.argv[1:]:
    name, what = row.split(":")
    sys.stdout.flush()
    if pid := os.fork():
        os.waitpid(pid, 0)
        continue
    os.dup2(1, 2)
    print(f"--- {name}", flush=True)
    try:
        lose(name)
        globals()[what]()
    except Exception as error:
        print(type(error).__name__, error)
    sys.stdout.flush()
    os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.deadline(190)
def test_a_newer_torch_works_or_is_named() -> None:
    rows = [f"{name}:{what}" for name, (what, _) in WITHOUT.items()]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *rows], capture_output=True, text=True, timeout=180
    )
    found = dict(part.split("\n", 1) for part in done.stdout.split("--- ")[1:])
    assert found.keys() == WITHOUT.keys(), done.stderr
    for name, (_, wanted) in WITHOUT.items():
        assert wanted in found[name], f"without {name}: {found[name]}"
