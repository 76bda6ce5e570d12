"""The files of commits: private, bounded, and removed some time after their job."""

from __future__ import annotations

import os
import time

import pytest

from hpcdist.elastic import memory
from hpcdist.elastic.memory import DamagedError, Head, Memory, shape
from hpcdist.startup import commits
from hpcdist.startup.commits import job_of_this_process

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(commits, "folder_of_user", lambda: tmp_path / "user")
    return tmp_path / "user"


def test_a_file_is_what_was_written_and_private(root):
    here = Memory("job")
    head = Head(7, "n", 6, 2, 1)
    blobs = [b"abc" * 1000, b""]
    here.write(head.name, [shape(head, blobs), *blobs])
    path = here.folder / "0.1.1"
    assert path.stat().st_mode & 0o777 == 0o600 and here.folder.stat().st_mode & 0o777 == 0o700
    (found,) = here.heads()
    assert (found.serial, found.step, found.size, found.rank) == (7, 6, 2, 1)
    assert here.read(head) == blobs
    with pytest.raises(DamagedError, match="another commit"):
        here.read(Head(5, "n", 6, 2, 1))
    whole = path.read_bytes()
    for place in range(0, len(whole), 97):  # each of them is noticed
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(DamagedError):
            here.read(head)
        path.write_bytes(whole[:place])
        with pytest.raises(DamagedError):
            here.read(head)
    here.remove()
    assert not root.exists()


def test_a_write_that_fails_leaves_nothing(root, monkeypatch):
    here = Memory("job")
    with pytest.raises(TypeError):
        here.write("0.0.0", [b"abc", 5])
    monkeypatch.setattr(memory, "SPARE", 1.0)
    with pytest.raises(OSError, match="MiB do not fit into"):
        here.write("0.0.0", [b"abc"])
    assert [path.name for path in here.folder.iterdir()] == ["lock"]
    (here.folder / "0.1.3.77.part").touch()
    (here.folder / "ended.0").touch()
    here.clean()
    assert [path.name for path in here.folder.iterdir()] == ["lock"]


def test_folders_of_ended_jobs_go_after_an_hour(root):
    dead, fresh, alive = Memory("dead"), Memory("fresh"), Memory("alive")
    for each in (dead, alive):
        os.utime(each.folder / "lock", (0, time.time() - memory.KEPT - 60))
    dead.close()
    fresh.close()
    own = Memory("own")
    assert not dead.folder.exists()
    assert fresh.folder.exists() and alive.folder.exists() and own.folder.exists()


def test_a_folder_of_somebody_else_is_refused(root, tmp_path):
    root.mkdir(mode=0o755)
    root.chmod(0o755)
    with pytest.raises(PermissionError, match="of this user alone"):
        Memory("job")
    root.chmod(0o700)
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (root / "commits-job").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="of this user alone"):
        Memory("job")


def test_whose_commits_they_are():
    assert job_of_this_process({}) == job_of_this_process({"TORCHELASTIC_MAX_RESTARTS": "0"}) == ""
    assert job_of_this_process({"TORCHELASTIC_MAX_RESTARTS": "2"}).startswith(
        f"torchrun-{os.getppid()}-"
    )
    assert job_of_this_process({"HPCDIST_COMMIT_JOB": "../a b"}) == ".._a_b"
