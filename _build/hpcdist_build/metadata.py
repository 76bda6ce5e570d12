"""setuptools' commands that write hpcdist.egg-info, kept out of the root of the source tree.

Torch loads the plugin that any egg-info in the current folder names. A python started in the source
tree without hpcdist installed has no such plugin, and ``import torch`` would fail there.
"""

from __future__ import annotations

from setuptools.command.egg_info import egg_info
from setuptools.command.sdist import sdist

from hpcdist_build.extensions import BUILD


class EggInfo(egg_info):
    """egg_info into build/."""

    def initialize_options(self) -> None:
        """Name the folder, unless the command line names another."""
        super().initialize_options()
        BUILD.mkdir(exist_ok=True)
        self.egg_base = str(BUILD)


class SDist(sdist):
    """sdist without build/: PKG-INFO in its root says what egg-info does."""

    def make_distribution(self) -> None:
        """Write the archive."""
        self.filelist.prune(str(BUILD))
        super().make_distribution()
