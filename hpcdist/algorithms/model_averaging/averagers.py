"""The names of ``torch.distributed.algorithms.model_averaging.averagers``."""

from hpcdist.parallel.averaging import ModelAverager, PeriodicModelAverager

__all__ = ["ModelAverager", "PeriodicModelAverager"]
