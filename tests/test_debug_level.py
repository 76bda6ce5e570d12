"""Debug levels: where they come from, and what they bring."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch.distributed

import hpcdist as dist
from hpcdist import debug_level

pytestmark = pytest.mark.local


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    for name in ("HPCDIST_DEBUG", "TORCH_DISTRIBUTED_DEBUG", "HPCDIST_CHECK", "HPCDIST_LOG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(debug_level, "_level", None)


def test_names_and_order_are_torchs():
    theirs = torch.distributed.DebugLevel.__members__
    assert list(dist.DebugLevel.__members__) == list(theirs)
    assert [int(level) for level in dist.DebugLevel] == [int(level) for level in theirs.values()]
    assert dist.DebugLevel.OFF < dist.DebugLevel.INFO < dist.DebugLevel.DETAIL


def test_the_environment_decides_until_it_is_set(monkeypatch):
    assert dist.get_debug_level() is dist.DebugLevel.OFF
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    assert dist.get_debug_level() is dist.DebugLevel.DETAIL
    monkeypatch.setenv("HPCDIST_DEBUG", "info")
    assert dist.get_debug_level() is dist.DebugLevel.INFO
    dist.set_debug_level_from_env()
    monkeypatch.setenv("HPCDIST_DEBUG", "off")
    assert dist.get_debug_level() is dist.DebugLevel.INFO
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    assert dist.get_debug_level() is dist.DebugLevel.DETAIL
    dist.set_debug_level(torch.distributed.DebugLevel.OFF)
    assert dist.get_debug_level() is dist.DebugLevel.OFF
    dist.set_debug_level("info")
    assert dist.get_debug_level() is dist.DebugLevel.INFO


@pytest.mark.parametrize("name", ["HPCDIST_DEBUG", "TORCH_DISTRIBUTED_DEBUG"])
def test_what_is_no_level_is_refused(monkeypatch, name):
    monkeypatch.setenv(name, "VERBOSE")
    with pytest.raises(ValueError, match=f"{name}='VERBOSE'"):
        dist.get_debug_level()
    with pytest.raises(ValueError, match=name):
        dist.set_debug_level_from_env()
    with pytest.raises(ValueError, match="loud"):
        dist.set_debug_level("loud")
    with pytest.raises(TypeError, match="2"):
        dist.set_debug_level(2)


def test_what_a_level_brings(monkeypatch):
    brings = {"OFF": ("on", ""), "INFO": ("on", "info"), "DETAIL": ("full", "debug")}
    for level, (check, log) in brings.items():
        dist.set_debug_level(level)
        assert (debug_level.check_level(), debug_level.log_level()) == (check, log)
    # what was asked for by itself wins
    monkeypatch.setenv("HPCDIST_CHECK", "off")
    monkeypatch.setenv("HPCDIST_LOG", "error")
    assert (debug_level.check_level(), debug_level.log_level()) == ("off", "error")


PROGRAM = """
import hpcdist as dist
dist.init_process_group()
g = dist.new_group([0], group_desc="alone")
print("check", dist.group.WORLD.carrier.check, g.carrier.check)
dist.destroy_process_group(g)
"""


@pytest.mark.parametrize(
    ("level", "said", "check"), [("OFF", [], 1), ("INFO", ["INFO"], 1), ("DETAIL", ["INFO"], 2)]
)
def test_in_a_process(level, said, check):
    """Under torch's own variable, a group that is made is logged with its rank and its check."""
    env = {**os.environ, "TORCH_DISTRIBUTED_DEBUG": level}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, env=env
    )
    assert done.stdout.split() == ["check", str(check), str(check)], done.stderr
    named = ("off", "on", "full")[check]
    for words in (f"debug level {level}", "group 'world' made", f"entry check {named}",
                  "group '[0]#1' made", "group '[0]#1' is being destroyed"):  # fmt: skip
        assert bool(said) == (words in done.stderr), done.stderr
    lines = [line for line in done.stderr.splitlines() if " INFO: " in line]
    assert all("INFO: [rank 0/1] " in line for line in lines), done.stderr
    assert bool(lines) == bool(said)
