"""The names of ``torch.distributed.algorithms.join``."""

from hpcdist.parallel.join import Join, Joinable, JoinHook

__all__ = ["Join", "JoinHook", "Joinable"]
