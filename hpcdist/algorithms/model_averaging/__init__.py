"""The module paths of ``torch.distributed.algorithms.model_averaging``."""
