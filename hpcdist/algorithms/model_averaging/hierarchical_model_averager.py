"""The names of ``torch.distributed.algorithms.model_averaging.hierarchical_model_averager``."""

from hpcdist.parallel.averaging import HierarchicalModelAverager

__all__ = ["HierarchicalModelAverager"]
