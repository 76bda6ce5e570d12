"""What ``torch.nn`` would have for several ranks: collectives that autograd goes through."""

from __future__ import annotations

from hpcdist.nn import functional

__all__ = ["functional"]
