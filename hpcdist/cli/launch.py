"""Start a program on several ranks, by the mpirun or srun that belongs to this hpcdist.

    python -m hpcdist launch -n 4 train.py --epochs 3
    python -m hpcdist launch -n 8 --hosts node1,node2 -m my.module

    python -m hpcdist launch -n 4 --max-restarts 3 train.py

The command line that is run is printed first; it may be used as it is. Each rank gets its share of
the cores, and each line of output its rank in front. The exit status is the launcher's. The program
finds RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, NODE_RANK, MASTER_ADDR and MASTER_PORT in its
environment, as under torchrun.

With --max-restarts a job that fails is started again, with the ranks that are left. A program that
trains with hpcdist.elastic goes on from its last commit (docs/surviving.md). A job that ends well,
with status 2 (wrong arguments), or by a signal to this command, is not started again.
"""

from __future__ import annotations

import argparse
import functools
import os
import shlex
import sys
from collections.abc import Mapping, Sequence

from hpcdist import config
from hpcdist.errors import DistBackendError
from hpcdist.launchers import batch, commands, rank, variables
from hpcdist.startup.variables import free_port

from .numbers import natural, positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("-n", type=positive, metavar="N", required=True, help="number of ranks")
    parser.add_argument(
        "--hosts",
        type=_hosts,
        default=(),
        metavar="A,B,...",
        help="machines; each gets the same number of ranks (default: this one, or the batch job's)",
    )
    parser.add_argument(
        "--launcher",
        default="auto",
        metavar="NAME",
        help="mpirun, srun or the path of one (default: srun in salloc's shell, else mpirun)",
    )
    parser.add_argument(
        "--no-bind", action="store_true", help="let every rank use all cores of its machine"
    )
    parser.add_argument(
        "--no-label", action="store_true", help="leave the rank in front of output lines out"
    )
    parser.add_argument(
        "--max-restarts",
        type=natural,
        default=0,
        metavar="N",
        help="start a job that fails up to N times again; a rank that was killed costs a slot of "
        "this machine, a host that is gone is left out",
    )
    parser.add_argument(
        "--standby",
        type=natural,
        default=0,
        metavar="M",
        help="with --max-restarts: M spare slots of this machine, or the last M of several hosts, "
        "take the place of lost ones",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the command and stop")
    parser.add_argument("-m", dest="module", action="store_true", help="the program is a module")
    parser.add_argument(
        "program",
        # in one, because a "--" between the two would be taken for argparse's
        nargs=argparse.PARSER,
        help="Python program, or with -m a module's name, and its own arguments",
    )


def run(options: argparse.Namespace) -> int:
    """Print the command and become the launcher; with restarts, stay and run it."""
    if options.program[0] == "--":  # newer argparses leave it out themselves
        del options.program[0]
    if not options.module and not os.path.exists(options.program[0]):
        print(f"hpcdist launch: there is no file {options.program[0]}", file=sys.stderr)
        return 2
    try:
        starter = commands.find(options.launcher)
    except DistBackendError as error:
        print(f"hpcdist launch: {error}", file=sys.stderr)
        return 1
    hosts = options.hosts
    if options.max_restarts:
        from hpcdist.cli import restarts  # loads torch; a plain launch needs none

        if isinstance(starter, commands.Srun) and not hosts:
            nodes = restarts.hosts_of_allocation(os.environ)
            hosts = tuple(nodes) if len(nodes) > 1 else ()
    problem = _problem(options, hosts)
    if problem:
        print(f"hpcdist launch: {problem}", file=sys.stderr)
        return 2
    build = functools.partial(_build, options, starter)
    if options.max_restarts and not options.dry_run:
        pool = restarts.Pool(options.n, options.standby, list(hosts))
        return restarts.supervise(pool, options.max_restarts, starter, build)
    used = hosts[: len(hosts) - options.standby] if options.max_restarts else options.hosts
    command, env = build(options.n, used, os.environ)
    if options.dry_run:
        return 0
    if isinstance(starter, commands.OpenMpi):
        env.update(commands.files_apart(os.getpid(), env))
    # Not a child: signals, Ctrl-C among them, and the exit status are the launcher's own.
    os.execve(command[0], command, env)


def _problem(options: argparse.Namespace, hosts: Sequence[str]) -> str:
    """What is wrong with the options, or the setting that is looked at; "" if nothing is."""
    try:
        config.get("ft")
    except ValueError as error:
        return str(error)
    if options.standby and not options.max_restarts:
        return "--standby needs --max-restarts: spare places are for a job that is started again"
    if hosts and options.standby >= len(hosts):
        return (
            f"with --standby {options.standby} none of the {len(hosts)} hosts is left to start on"
        )
    used = len(hosts) - options.standby
    if hosts and options.n % used:
        return f"{options.n} ranks cannot be divided among {used} hosts"
    return ""


def _build(
    options: argparse.Namespace,
    starter: commands.Starter,
    ranks: int,
    hosts: Sequence[str],
    environ: Mapping[str, str],
) -> tuple[list[str], dict[str, str]]:
    """Print the command line, and return it with its environment."""
    program = [sys.executable, *(["-m"] if options.module else []), *options.program]
    env = _environment(starter, hosts, environ)
    command = starter.command(
        ranks,
        [*_shim(starter, ranks, len(hosts) or starter.nodes(env)), *program],
        hosts,
        bind=not options.no_bind,
        label=not options.no_label,
        environ=env,
    )
    print(f"+ {shlex.join(command)}", file=sys.stderr, flush=True)
    return command, env


def _environment(
    starter: commands.Starter, hosts: Sequence[str], environ: Mapping[str, str]
) -> dict[str, str]:
    """The environment with MASTER_ADDR and MASTER_PORT; srun's first node is not known yet."""
    env = dict(environ)
    place = {"MASTER_PORT": str(free_port())}
    if not isinstance(starter, commands.Srun):
        number, first = (len(hosts), hosts[0]) if hosts else batch.nodes(environ)
        address = first if hosts or number > 1 else "127.0.0.1"
        place.update({"MASTER_ADDR": address} if address else {})
    variables.export(place, env)
    return env


def _shim(starter: commands.Starter, ranks: int, nodes: int) -> list[str]:
    """The program that sets RANK and the like on each rank, and becomes the user's."""
    equal = not ranks % nodes  # else a batch job's last node gets fewer
    blocks = ["--blocks"] if equal and not isinstance(starter, commands.Srun) else []
    return [sys.executable, "-IS", rank.__file__, *blocks]


def _hosts(text: str) -> tuple[str, ...]:
    hosts = tuple(host.strip() for host in text.split(",") if host.strip())
    if not hosts:
        raise argparse.ArgumentTypeError("names no host")
    return hosts
