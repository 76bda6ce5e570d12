"""``DistributedSampler``: this rank's share of a data set."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler

from hpcdist.groups import state as _group

__all__ = ["DistributedSampler"]


class DistributedSampler(Sampler[int]):
    """Give every rank its own equal share of a data set.

    Follows ``torch.utils.data.DistributedSampler`` and yields the same indices for the same
    arguments, so that one can stand in for the other in the middle of a training run. Nothing is
    communicated: all ranks draw the same permutation and each takes every `num_replicas`-th entry.

    Parameters
    ----------
    dataset : Sized
        Anything with a length; it must be the same on all ranks.
    num_replicas : int, optional
        Number of shares. Default: the size of hpcdist's default group, or 1 without one.
    rank : int, optional
        Which share, in ``[0, num_replicas)``. Default: this process's rank in hpcdist's default
        group, or 0 without one.
    shuffle : bool
        Permute the indices, differently in every epoch.
    seed : int
        Seed of the permutation together with the epoch; the same on all ranks.
    drop_last : bool
        When the length does not divide evenly: leave out the tail instead of repeating samples
        from the beginning.

    Raises
    ------
    ValueError
        If `rank` or `num_replicas` is out of range.

    Notes
    -----
    After :meth:`hpcdist.ProcessGroup.reconfigure` the shares are those of the ranks that are left,
    unless `num_replicas` or `rank` was given. Call :meth:`set_epoch` before each epoch, on all
    ranks; without it every epoch has the same order. With ``drop_last=False`` up to
    ``num_replicas - 1`` samples are seen twice: fine for training, wrong for an exact test score.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self._follows = num_replicas is None, rank is None
        self._generation = 0 if _group.world.pg is None else _group.world.pg.members.generation
        num_replicas, rank = self._place(num_replicas, rank)
        if num_replicas < 1:
            raise ValueError(f"num_replicas must be at least 1, not {num_replicas}")
        if not 0 <= rank < num_replicas:
            raise ValueError(f"rank {rank} is outside [0, {num_replicas - 1}]")
        self.dataset = dataset
        self.num_replicas = num_replicas
        self.rank = rank
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self._divide()

    @staticmethod
    def _place(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
        initialized = _group.is_initialized()
        if num_replicas is None:
            num_replicas = _group.get_world_size() if initialized else 1
        if rank is None:
            rank = _group.get_rank() if initialized else 0
        return num_replicas, rank

    def _divide(self) -> None:
        self.num_samples = self._each(len(self.dataset))
        self.total_size = self.num_samples * self.num_replicas

    def _each(self, size: int) -> int:
        """Samples of each rank, of so many in all."""
        return size // self.num_replicas if self.drop_last else -(-size // self.num_replicas)

    def _follow(self) -> None:
        """Share anew if the default group, whose ranks this follows, was reconfigured."""
        pg = _group.world.pg
        if pg is None or pg.members.generation == self._generation:
            return
        self._generation = pg.members.generation
        size, rank = self._follows
        self.num_replicas, self.rank = self._place(
            None if size else self.num_replicas, None if rank else self.rank
        )
        self._divide()

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's indices for the current epoch, `num_samples` of them.

        Raises
        ------
        ValueError
            If the data set has grown since it was shared out, so that some of it would be left out;
            with `drop_last` also if it has shrunk; or if it is empty now.
        """
        self._follow()
        size = len(self.dataset)
        least = self.total_size if self.drop_last else min(1, self.total_size)
        if size < least or self._each(size) > self.num_samples:
            raise ValueError(
                f"the data set has {size} samples now, which its DistributedSampler has not shared "
                f"out: it has {self.total_size} for all ranks. Make a new sampler, on all ranks"
            )
        if self.shuffle:
            generator = torch.Generator()
            generator.manual_seed(self.seed + self.epoch)
            indices = torch.randperm(size, generator=generator, device="cpu")
        else:
            indices = torch.arange(size, device="cpu")
        if self.total_size > size:
            # Begin again from the front, several times over if there are more ranks than samples.
            indices = indices.repeat(-(-self.total_size // size))
        return iter(indices[self.rank : self.total_size : self.num_replicas].tolist())

    def __len__(self) -> int:
        """Samples that this rank sees in an epoch."""
        self._follow()
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation of the next iteration.

        Parameters
        ----------
        epoch : int
            Number of the epoch; every rank must pass the same.
        """
        self.epoch = epoch
