"""``python -m hpcdist.debug.server``: started by the ranks, not by users."""

import sys

from .process import main

if __name__ == "__main__":
    sys.exit(main())
