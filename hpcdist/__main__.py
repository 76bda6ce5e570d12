"""``python -m hpcdist``: the tools that come with hpcdist."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
