"""The names of ``torch.distributed.distributed_c10d``: those of hpcdist, and the default group."""

import hpcdist
from hpcdist import *  # noqa: F403
from hpcdist.groups.state import _get_default_group

__all__ = [*hpcdist.__all__, "_get_default_group"]  # noqa: PLE0604
