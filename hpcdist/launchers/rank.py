"""What ``python -m hpcdist launch`` starts on every rank: it sets RANK and the like, and becomes
the program.

    python -IS rank.py [--blocks] PYTHON ARGUMENT...

The program reads its environment before it imports anything of ours, so this runs before it. It
loads neither hpcdist nor torch nor site-packages: a few milliseconds per rank.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from types import ModuleType


def launchers(name: str = "launchers") -> ModuleType:
    """Load the package that this file is in, without the one above it, which loads MPI."""
    folder = os.path.dirname(os.path.abspath(__file__))
    spec = importlib.util.spec_from_file_location(
        name, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Set the variables, and become the program."""
    arguments = sys.argv[1:]
    in_blocks = arguments[0] == "--blocks"
    command = arguments[in_blocks:]
    package = launchers()
    launcher = package.find()
    if launcher is not None and launcher.mpi:
        launch = launcher.read(os.environ)
        wrong = package.variables.export_launch(launch, os.environ, in_blocks=in_blocks)
        for name, former in wrong.items():
            print(
                f"hpcdist launch: {name}={former} was set and is wrong here: it is now "
                f"{os.environ.get(name, 'not set')}",
                file=sys.stderr,
            )
        if launcher is package.HYDRA:
            package.lines.ask_for(os.environ)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
