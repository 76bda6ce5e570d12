"""Python's stacks where a thread keeps its lock: a fault while they are read ends no rank."""

from __future__ import annotations

import pytest
from jobs import run_job

pytestmark = pytest.mark.jobs

#: Rank 1 keeps the lock while rank 0 times out; it reads its own stacks without the lock then.
PROGRAM = """
import ctypes, os, signal, sys, numpy as np, hpcdist as dist
from datetime import timedelta
dist.init_process_group()
dist.barrier()
rank = dist.get_rank()
if rank == 1:
    if sys.argv[1] == "faults":  # as if the frames had changed: no code is there
        libc = ctypes.CDLL(None)
        libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
        libc.signal(signal.SIGRTMIN + 12, 8)
    ctypes.PyDLL(None).usleep(6_000_000)  # it keeps the lock
else:
    dist.group.WORLD.carrier.timeout = 1.0
    try:
        dist.all_reduce(np.ones(3))
    except dist.DistTimeoutError:
        dist.group.WORLD.carrier.timeout = 60.0
try:
    dist.barrier()  # the call that rank 0 has given up, on rank 1
except dist.DistTimeoutError:
    dist.barrier()
ones = np.ones(3)
dist.all_reduce(ones)
assert (ones == 2).all()
os.write(1, b"went on\\n")
"""


@pytest.mark.parametrize("what", ["faults", "reads"])
def test_a_report_of_a_rank_that_keeps_pythons_lock(what, tmp_path):
    (tmp_path / "keeps.py").write_text(PROGRAM)
    ended = run_job(2, str(tmp_path / "keeps.py"), what, limit=60)
    assert ended.code == 0 and ended.text.count("went on") == 2, ended.text
    assert "hang report of the 2 ranks" in ended.text, ended.text
    if what == "faults":
        assert "the stacks cannot be read" in ended.text, ended.text
    else:
        assert 'keeps.py", line 16 in <module>' in ended.text, ended.text
        assert "(A thread of this process keeps Python's lock.)" in ended.text, ended.text
