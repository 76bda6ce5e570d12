"""``python -m hpcdist``: the tools that come with hpcdist."""

import sys

from .cli import program

if __name__ == "__main__":
    sys.exit(program())
