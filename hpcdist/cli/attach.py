"""Talk to a rank that waits at a breakpoint.

A rank that stops at hpcdist.breakpoint() and has no standard input of its own prints the command
to use. Run it on that rank's host, as the same user. Ctrl-D lets the job go on.
"""

from __future__ import annotations

import argparse
import os
import select
import socket
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to a parser."""
    parser.add_argument("path", help="the socket that the rank has printed")


def run(options: argparse.Namespace) -> int:
    """Carry lines to the rank and its answers back, until one side ends."""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(options.path)
        except OSError as error:
            why = error.strerror or error
            print(
                f"hpcdist attach: no rank waits at {options.path} ({why}). It has to run on the "
                "rank's own host, by the same user, while the rank waits.",
                file=sys.stderr,
            )
            return 1
        # unbuffered: select knows nothing of lines that a buffer holds
        keyboard, screen = sys.stdin.fileno(), sys.stdout.fileno()
        sources: list[int] = [connection.fileno(), keyboard]
        while True:
            ready, _, _ = select.select(sources, [], [])
            if connection.fileno() in ready:
                data = connection.recv(65536)
                if not data:
                    return 0
                os.write(screen, data)
            if keyboard in ready:
                data = os.read(keyboard, 65536)
                if data:
                    connection.sendall(data)
                else:
                    connection.shutdown(socket.SHUT_WR)
                    sources.remove(keyboard)
