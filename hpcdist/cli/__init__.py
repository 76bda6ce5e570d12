"""The command line: ``python -m hpcdist COMMAND``.

Each command is a module or package of this folder with two functions, ``add_arguments(parser)`` and
``run(options) -> int`` (the exit status); one that has commands of its own has ``main(arguments)``
instead. It is imported only when it is asked for, so a command that needs neither torch nor MPI
works where there is none.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from hpcdist.debug.versions import version_of

__all__ = ["COMMANDS", "main", "program"]

#: Command -> what it does, in one line of a terminal. The module of the same name in this folder
#: does it (a dash is an underscore there).
COMMANDS: dict[str, str] = {
    "analyze": "find out from flight recorders where ranks diverged and what they waited for",
    "attach": "connect to a rank that waits at hpcdist.breakpoint()",
    "bench": "measure operations, and compare with other libraries",
    "diagnose": "report what hpcdist runs on, what is wrong, and the fix",
    "launch": "start a program on several ranks, with mpirun or srun",
    "merge-traces": "merge the profiler's traces of several ranks into one",
    "top": "show what each rank of a running job is in, and where it hangs",
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
        The exit status: 0 if all is well, 2 if the arguments make no sense. Without a command the
        list of them is printed.
    """
    parser = argparse.ArgumentParser(
        prog="python -m hpcdist",
        usage="%(prog)s [-h] [--version] COMMAND ...",
        description="Distributed communication for deep learning on HPC clusters.",
        epilog=f"commands:\n{_listing()}\n\n"
        "%(prog)s COMMAND --help shows the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"hpcdist {version_of('hpcdist')}")
    commands = parser.add_subparsers(dest="command", prog=parser.prog, help=argparse.SUPPRESS)
    words = sys.argv[1:] if arguments is None else list(arguments)
    for name, line in COMMANDS.items():
        # Only the chosen command's module is imported, for its arguments.
        module = _module(name) if name in words[:1] else None
        if module and hasattr(module, "main"):
            return module.main(words[1:])
        command = commands.add_parser(
            name,
            description=module.__doc__ if module else line,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            add_help=module is not None,
        )
        if module:
            module.add_arguments(command)
    options = parser.parse_args(words)
    if options.command is None:
        parser.print_help()
        return 0
    return _module(options.command).run(options)


def program() -> int:
    """Run the command of this process's arguments, and print one line if its output is lost.

    Returns
    -------
    int
        The exit status: that of :func:`main`, or 1 if standard output cannot be written to. No line
        is printed where a reader has closed it, as ``head`` does.
    """
    try:
        try:
            return main()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except OSError as error:
        if error.filename is not None or error.errno not in _LOST:
            raise
        if error.errno != errno.EPIPE:
            print(f"hpcdist: the output is lost: {error.strerror}", file=sys.stderr)
        # what is still in the buffer would fail again when Python ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1


#: Errors of a standard output that takes no more.
_LOST = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF, errno.EFBIG)


def _listing() -> str:
    """The commands; argparse would put a long name on a line of its own."""
    width = max(map(len, COMMANDS))
    return "\n".join(f"  {name:<{width}}  {line}" for name, line in COMMANDS.items())


def _module(command: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{command.replace('-', '_')}")
