"""Records of a FileStore that are torn or damaged, by a crash or a bad disk."""

from __future__ import annotations

import os
import random

import pytest
from store_kills import kill_writers

import hpcdist
from hpcdist import DistStoreError
from hpcdist.errors import StoreTimeoutError
from hpcdist.store import _files as files
from hpcdist.store import _journal as journal
from hpcdist.store._shared_file import SharedFile

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]


# --- torn and damaged records ------------------------------------------------------------------


def entries(store):
    return [(journal.SET, f"key{i}", os.urandom(40)) for i in range(3)]


@pytest.mark.parametrize("cut", [1, 20, 33, 60])
def test_a_torn_record_is_ignored_and_cut_off(folder, cut):
    store = hpcdist.FileStore(folder / "f")
    store.set("k", "v")
    good = (folder / "f").read_bytes()
    record = journal.encode(
        store._file._header.nonce, len(good), [(journal.SET, "torn", b"x" * 90)]
    )
    with open(folder / "f", "ab") as file:
        file.write(record[:cut])
    other = hpcdist.FileStore(folder / "f") if cut % 2 else store
    assert not other.check(["torn"]) and other.get("k") == b"v"
    other.set("l", "w")
    assert store.multi_get(["k", "l"]) == [b"v", b"w"]
    assert (folder / "f").read_bytes().startswith(good)
    assert record[:cut] not in (folder / "f").read_bytes()[len(good) + 1 :] or cut == 1


def test_a_record_of_zeros_is_torn(folder):
    """What a crash of the machine leaves: the length is there, the contents are not."""
    store = hpcdist.FileStore(folder / "f")
    store.set("k", "v")
    with open(folder / "f", "ab") as file:
        file.write(bytes(5000))
    store.set("l", "w")
    assert hpcdist.FileStore(folder / "f").multi_get(["k", "l"]) == [b"v", b"w"]


def test_damage_in_the_middle_is_an_error(folder):
    """Cutting there would lose what was acknowledged."""
    store = hpcdist.FileStore(folder / "f")
    store.set("first", "v" * 50)
    place = (folder / "f").stat().st_size - 20
    store.set("second", "w")
    with open(folder / "f", "r+b") as file:
        file.seek(place)
        file.write(b"#")
    for call in (lambda: hpcdist.FileStore(folder / "f"),):
        with pytest.raises(DistStoreError, match="damaged: .*records follow"):
            call()


def test_any_flipped_bit_is_noticed(rng):
    nonce = os.urandom(16)
    record = journal.encode(nonce, 100, [(journal.SET, "key", b"value"), (journal.PUSH, "q", b"")])
    right = ([(journal.SET, "key", b"value"), (journal.PUSH, "q", b"")], len(record))
    assert journal.records(nonce, 100, record) == right
    assert journal.records(nonce, 101, record) == ([], 0)
    assert journal.records(os.urandom(16), 100, record) == ([], 0)
    for bit in range(8 * len(record)):
        wrong = bytearray(record)
        wrong[bit // 8] ^= 1 << bit % 8
        assert journal.records(nonce, 100, bytes(wrong)) == ([], 0)
    for size in range(len(record)):
        assert journal.records(nonce, 100, record[:size]) == ([], 0)


def test_writers_that_are_killed(folder):
    """The short form of tests/perf/stores.py: acknowledged writes are there, nothing hangs."""
    told = kill_writers(folder / "f", 12, random.Random(0))
    assert told["acknowledged"] > 20 and told["lost"] == 0 and told["wrong"] == 0


def test_a_handlers_exception_in_the_middle_of_a_record(folder, monkeypatch):
    """What was read so far does not count twice."""
    from hpcdist.store._contents import Contents

    name = str(folder / "store")
    writer, reader = hpcdist.FileStore(name), hpcdist.FileStore(name)
    for turn in range(5):
        writer.append("key", str(turn))
    apply, left = Contents.apply, [3]

    def stopping(self, entry):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        apply(self, entry)

    monkeypatch.setattr(Contents, "apply", stopping)
    with pytest.raises(KeyboardInterrupt):
        reader.get("key")
    assert reader.get("key") == b"01234"
    left[0] = 1
    with pytest.raises(KeyboardInterrupt):
        writer.append("key", "5")
    assert writer.get("key") == reader.get("key") == b"012345"


def test_the_file_system_is_known_beside_mounts_whose_names_are_no_text(tmp_path, monkeypatch):
    at = os.stat(tmp_path).st_dev
    mounts = tmp_path / "mountinfo"
    mounts.write_bytes(
        b"30 1 0:99 / /media/caf\xe9 rw - vfat /dev/sdb1 rw\n"
        + f"31 1 {os.major(at)}:{os.minor(at)} / /home rw - nfs4 server:/home rw\n".encode()
    )
    monkeypatch.setattr(files, "open", lambda _, **how: open(mounts, **how), raising=False)
    assert files.file_system(str(tmp_path)) == "nfs4"


def test_a_file_that_is_deleted_while_it_is_opened(tmp_path, monkeypatch):
    """By the last member of an earlier job, or by a script that cleans up."""
    path = str(tmp_path / "store")
    opened = files.open_private

    def lost(name):
        fd = opened(name)
        os.unlink(name)
        return fd

    with monkeypatch.context() as patch:
        patch.setattr(files, "open_private", lost)
        with pytest.raises(StoreTimeoutError, match="was deleted while it was opened"):
            hpcdist.FileStore(path, 2, timeout=0)

    joined = SharedFile._join

    def joins(self, deadline):
        joined(self, deadline)
        os.unlink(path)

    monkeypatch.setattr(SharedFile, "_join", joins)
    store = hpcdist.FileStore(path, 2)
    store.set("key", "value")
    assert store.get("key") == b"value"
