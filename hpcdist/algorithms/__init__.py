"""The module paths of ``torch.distributed.algorithms``, for programs written to them.

The rooms themselves are ``hpcdist.parallel`` and ``hpcdist.parallel.comm_hooks``.
"""
