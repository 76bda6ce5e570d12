"""Commits on disk, the last resort: a folder per commit, written through torch's DCP.

``step-N/rank-R`` is a checkpoint of ``torch.distributed.checkpoint`` for each rank, in which every
tensor has an entry of its own; rank 0's contains what all ranks have. The rest is one entry of
bytes, the codec's, with a checksum of each tensor. A commit's folder gets its name when all ranks
have written.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import warnings
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from hpcdist import codec, log
from hpcdist.elastic.deaths import is_death
from hpcdist.elastic.exchange import gathered
from hpcdist.elastic.keep import Found
from hpcdist.errors import DistError
from hpcdist.groups.world import world
from hpcdist.parallel.host import on_cpu

_log = log.get_logger("elastic")
#: Entry of everything but tensors.
_REST = "hpcdist"
#: Commits that stay.
_KEPT = 2
#: Folders from which a State of this process has resumed.
_claimed: set[str] = set()
#: Types of dictionaries whose tensors have entries of their own.
_DICTS = (dict, OrderedDict)


class Disk:
    """Writes and finds commits in a folder that all ranks can reach; all ranks must call it.

    Parameters
    ----------
    folder : path-like
        It is made if it is not there.
    agree : callable
        Takes a flag, and returns whether all ranks gave a true one.
    """

    def __init__(self, folder: str | os.PathLike[str], agree: Callable[[bool], bool]) -> None:
        self._folder = Path(folder)
        self._agree = agree

    def claim(self) -> None:
        """Take the folder for one State of this process; local.

        Raises
        ------
        ValueError
            If another one has it: it would take over what that one has committed.
        """
        path = os.path.realpath(self._folder)
        if path in _claimed:
            raise ValueError(
                f"another State of this program keeps its commits in {self._folder}: give each a "
                "folder of its own"
            )
        _claimed.add(path)

    def keep(self, step: int, own: Any, shards: Any) -> bool:
        """Write a commit; return whether all ranks have."""
        rank, size = world.comm.rank, world.comm.size
        part, whole = self._folder / f"step-{step}.part", self._folder / f"step-{step}"
        if rank == 0:
            for old in self._folder.glob("step-*.part"):  # also of a job that died in it
                shutil.rmtree(old, ignore_errors=True)
        self._agree(True)  # nobody writes before that
        if rank:  # rank 0's are the same
            own = own | {"parts": {}}
        problem = ""
        try:
            part.mkdir(parents=True, exist_ok=True)
            _save({"own": own, "shards": shards, "size": size}, part / f"rank-{rank}")
        except Exception as error:  # of any kind: DCP reads and writes
            problem = f"{type(error).__name__}: {error}"
        if problem:
            _log.warning("the commit of step %d is not kept in %s: %s", step, part, problem)
        try:
            # gathered, for a rank that has died has no say in what is agreed, nor a file
            well = all(gathered(not problem))
        except DistError as error:
            if not is_death(error):
                raise
            well = False
        well = self._agree(well)
        named = self._name(step, part, whole) if rank == 0 and well else True
        return self._agree(named) and well

    def _name(self, step: int, part: Path, whole: Path) -> bool:
        """Give a commit's folder its name; return whether it has it."""
        try:
            shutil.rmtree(whole, ignore_errors=True)
            os.replace(part, whole)
        except OSError as error:
            _log.warning("the commit of step %d is not kept in %s: %s", step, whole, error)
            return False
        for old in self._steps()[_KEPT:]:
            shutil.rmtree(self._folder / f"step-{old}", ignore_errors=True)
        return True

    def _steps(self) -> list[int]:
        """Steps of the commits there are, the newest first."""
        if not self._folder.is_dir():
            return []
        names = (re.fullmatch(r"step-(\d+)", path.name) for path in self._folder.iterdir())
        return sorted((int(name[1]) for name in names if name), reverse=True)

    def find(self, after: int = -1) -> Found | None:
        """Read the newest commit that is undamaged.

        Parameters
        ----------
        after : int
            Only one of more steps than that.

        Returns
        -------
        Found or None
            None if there is none.
        """
        for step in gathered(self._steps())[0]:  # rank 0's: all look at the same ones
            if step <= after:
                break
            found, problem = None, ""
            try:
                found = self._read(step)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            if problem:
                _log.warning(
                    "the commit in %s/step-%d is not used: %s", self._folder, step, problem
                )
            if self._agree(found is not None):
                return found
        return None

    def _read(self, step: int) -> Found:
        rank, ranks = world.comm.rank, world.comm.size
        whole = self._folder / f"step-{step}"
        first = _load(whole / "rank-0")
        size = first["size"]
        mine = {0: first} if rank == 0 else {}
        for old in {rank % size, *range(rank, size, ranks)} - set(mine):
            mine[old] = _load(whole / f"rank-{old}")
        own = mine[rank % size]["own"] | {"parts": first["own"]["parts"]}
        shards = {old: mine[old]["shards"] for old in range(rank, size, ranks)}
        return Found(step, size, own, shards, size == ranks)


def _save(thing: Any, folder: Path) -> None:
    from torch.distributed import checkpoint  # a second to import

    tensors: dict[str, torch.Tensor] = {}
    rest = {"skeleton": _without(on_cpu(thing), "", tensors)}
    rest["checksums"] = {name: _checksum(tensor) for name, tensor in tensors.items()}
    packed = torch.frombuffer(codec.encode(rest), dtype=torch.uint8)
    # each rank writes a checkpoint of its own, which needs no process group of torch's
    with _plainly():
        checkpoint.save({**tensors, _REST: packed}, checkpoint_id=folder, no_dist=True)


def _load(folder: Path) -> Any:
    with _plainly():
        return _read_all(folder)


@contextlib.contextmanager
def _plainly() -> Iterator[None]:
    """Without DCP's warning that it has no process group, and with the cause of its errors."""
    from torch.distributed.checkpoint import CheckpointException

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*assuming the intent is to .* in a single process")
        try:
            yield
        except CheckpointException as error:  # not an Exception
            cause = next(iter(error.failures.values()))[0]
            raise OSError(f"{type(cause).__name__}: {cause}") from error


def _read_all(folder: Path) -> Any:
    from torch.distributed import checkpoint

    entries = checkpoint.FileSystemReader(folder).read_metadata().state_dict_metadata
    there: dict[str, torch.Tensor] = {}
    for name, entry in entries.items():
        if not isinstance(entry, checkpoint.metadata.TensorStorageMetadata):
            raise ValueError(f"{name} is no tensor: this is not hpcdist's")
        there[name] = torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
    checkpoint.load(there, checkpoint_id=folder, no_dist=True)
    rest = codec.decode(there.pop(_REST).numpy())
    for name, checksum in rest["checksums"].items():
        if _checksum(there[name]) != checksum:
            raise ValueError(f"the checksum of {name} is wrong")
    return _with(rest["skeleton"], there)


def _checksum(tensor: torch.Tensor) -> int:
    flat = tensor.contiguous().as_strided(
        (tensor.numel(),), (1,)
    )  # one element may have any stride
    return zlib.crc32(flat.view(torch.uint8).numpy().data)


def _without(thing: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Take the tensors out of a structure, and name them by their places."""
    if isinstance(thing, torch.Tensor):
        name = path.rstrip("/")
        while name in tensors or name == _REST:  # keys 1 and "1"
            name += "'"
        tensors[name] = thing
        return SimpleNamespace(hpcdist_tensor=name)
    if type(thing) in _DICTS:  # others, a Counter say, are made otherwise: the codec has them whole
        return _like(thing, {k: _without(v, f"{path}{k}/", tensors) for k, v in thing.items()})
    if type(thing) in (list, tuple):
        return type(thing)(_without(v, f"{path}{n}/", tensors) for n, v in enumerate(thing))
    return thing


def _like(thing: Any, content: dict[Any, Any]) -> Any:
    """Return a dictionary as `thing` is one, with its attributes: a module's state has some."""
    if type(thing) is dict:
        return content
    made = OrderedDict(content)
    vars(made).update(vars(thing))
    return made


def _with(thing: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Put them back."""
    if isinstance(thing, SimpleNamespace) and set(thing.__dict__) == {"hpcdist_tensor"}:
        return tensors[thing.hpcdist_tensor]
    if type(thing) in _DICTS:
        return _like(thing, {k: _with(v, tensors) for k, v in thing.items()})
    if type(thing) in (list, tuple):
        return type(thing)(_with(v, tensors) for v in thing)
    return thing
