"""``hpcdist.group`` is the state of this process's groups: :mod:`hpcdist.groups.state` itself.

A copy of its names would keep showing the WORLD that there was when it was imported.
"""

import sys

from hpcdist.groups import state

sys.modules[__name__] = state
