"""The command line: ``python -m hpcdist COMMAND``.

Each command is a module or package of this folder with two functions, ``add_arguments(parser)`` and
``run(options) -> int`` (the exit status); one that has commands of its own has ``main(arguments)``
instead. It is imported only when it is asked for, so a command that needs neither torch nor MPI
works where there is none.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType

__all__ = ["COMMANDS", "main"]

#: Command -> what it does, in a line. The module of the same name in this folder does it (a dash is
#: an underscore there).
COMMANDS: dict[str, str] = {
    "attach": "talk to a rank that waits at hpcdist.breakpoint()",
    "diagnose": "report what hpcdist runs on here, what is wrong, and how to fix it",
    "launch": "start a program on several ranks, by the site's mpirun or srun",
    "bench": "measure collectives, point to point and overlap, beside other libraries",
    "merge-traces": "put the profiler's traces of several ranks into one",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    arguments : sequence of str, optional
        The command and its arguments; by default those of the process.

    Returns
    -------
    int
        The exit status: 0 if all is well, 2 if the arguments make no sense.
    """
    parser = argparse.ArgumentParser(
        prog="python -m hpcdist",
        description="Distributed communication for deep learning on HPC clusters.",
        epilog="python -m hpcdist COMMAND --help tells more.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    words = sys.argv[1:] if arguments is None else list(arguments)
    for name, line in COMMANDS.items():
        # Only the chosen command's module is imported, for its arguments.
        module = _module(name) if name in words[:1] else None
        if module and hasattr(module, "main"):
            return module.main(words[1:])
        command = commands.add_parser(
            name,
            help=line,
            description=module.__doc__ if module else line,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            add_help=module is not None,
        )
        if module:
            module.add_arguments(command)
    options = parser.parse_args(words)
    return _module(options.command).run(options)


def _module(command: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{command.replace('-', '_')}")
