#!/usr/bin/env python
"""Count what the engine's own files send, and model it for more ranks than can be simulated.

    python tests/scale/run.py --short            64 ranks: seconds
    python tests/scale/run.py                    64 to 512 simulated ranks, to 100,000 modelled
    python tests/scale/run.py --plot docs/scale.svg

SimGrid's SMPI runs the engine's C files as they stand (`ranks.c`), with an all-reduce of messages
for new communicators (`shim.c`). The models are in `model.py`, the network in `network.py`. Needs
`smpicc` and `smpirun` (Debian: libsimgrid-dev), for the model of 100,000 ranks 3 GiB, and
matplotlib for the plot. Exits with 0 only if no rank sent and received more than LIMITS allows, no
simulated rank got another outcome than it should, and models and simulation agree.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from model import MODELS, Cost
from network import BYTES_PER_SECOND, LATENCY, LONG_POLL, OVERHEAD, POLL

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ENGINE = (
    *("ballot", "base", "carry", "caucus", "check_mpi", "here", "job", "late", "leave", "meet"),
    *("outbox", "page_pairs", "post", "recorder", "report", "roll", "roll_desk", "roll_words"),
    *("rounds", "scale"),
)
SOURCES = (
    *("tests/scale/ranks.c", "tests/scale/shim.c", "tests/stress/stub/stub.c"),
    *(
        path.relative_to(ROOT).as_posix()
        for path in sorted(ROOT.glob("pyx/hpcdist/engine/*/hd_*.c"))
        if path.stem.removeprefix("hd_") in ENGINE
    ),
    "pyx/hpcdist/kernels/hd_types.c",
)
FLAGS = (
    # SMPI has its own malloc, which the engine's memory does not need.
    *"-std=gnu11 -O2 -Wall -Wextra -DSMPI_NO_OVERRIDE_MALLOC -include tests/scale/shim.h".split(),
    "-Itests/scale",
    *sorted({f"-I{path.parent.relative_to(ROOT)}" for path in ROOT.glob("pyx/**/*.h")}),
)
SIZES, LARGE = (64, 128, 256, 512), (1024, 4096, 16384, 100000)
#: Seconds for one simulated call.
LIMIT_S = 120


def _log2(ranks: int) -> int:
    return (ranks - 1).bit_length()


#: Messages that one rank may send and receive.
LIMITS: dict[str, Callable[[int], int]] = {
    "agree": lambda ranks: 4 * _log2(ranks),
    "late": lambda ranks: 10 * _log2(ranks),
    "absent": lambda ranks: 12 * _log2(ranks),
    "group": lambda _: 36,
    "start": lambda ranks: 36 + 2 * _log2(ranks),
    # The first ones have waited for half their time when the last arrive.
    "agree-spread": lambda ranks: 10 * _log2(ranks),
    "start-spread": lambda ranks: 36 + 2 * _log2(ranks),
    # Members whose parents are silent turn to the leader: docs/scale.md.
    "group-spread": lambda ranks: 36 + 3 * ranks,
}
#: Those in which ranks wait for seconds; their time is that of the late rank.
LONG = ("late", "absent", "agree-spread", "start-spread", "group-spread")
#: A model's time may be off by this factor. The model of a late rank, where all look at the same
#: moment, may count so many messages more; the others may be off by none.
FACTOR, MORE = 1.25, 4


@dataclass(frozen=True)
class Result:
    """What one call cost in the simulation."""

    messages: int
    bytes: int
    seconds: float
    wrong: str


def compile_ranks(folder: Path) -> Path:
    """Compile the program that every simulated rank runs."""
    out = folder / "ranks"
    command = ["smpicc", *FLAGS, *SOURCES, "-o", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return out


def write_platform(folder: Path, ranks: int) -> list[str]:
    """Describe a network of so many hosts; returns smpirun's arguments for it."""
    platform, hosts = folder / f"{ranks}.xml", folder / f"{ranks}.hosts"
    platform.write_text(
        "<?xml version='1.0'?>\n"
        '<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">\n<platform version="4.1">\n'
        f'<cluster id="c" prefix="n" suffix="" radical="0-{ranks - 1}" speed="10Gf" '
        f'bw="{BYTES_PER_SECOND:g}Bps" lat="{LATENCY / 2:g}s"/>\n</platform>\n'
    )
    hosts.write_text("".join(f"n{rank}\n" for rank in range(ranks)))
    return ["-np", str(ranks), "-platform", str(platform), "-hostfile", str(hosts)]


def wrong_with(what: str, rows: list[list[str]], ranks: int) -> str:
    """Say which rank got another outcome than it should; "" if none did."""
    if len(rows) != ranks:
        return f"{len(rows)} of {ranks} ranks ended"
    for row in rows:
        rank, code, text = row[0], row[5], row[6] if len(row) > 6 else ""
        if what == "absent" and rank != "1":
            good = code == "3" and ("no word from rank 1." in text or " gave up after " in text)
        else:
            good = code == "0" and not text
        if not good:
            return f"rank {rank}: code {code}, {text!r}"
    return ""


def simulate(binary: Path, folder: Path, what: str, ranks: int) -> Result:
    """Run one call on so many simulated ranks."""
    poll = LONG_POLL if what in LONG else POLL
    settings = {
        "smpi/simulate-computation": "no",  # the same result on any machine
        "smpi/test": poll,
        "smpi/iprobe": poll,
        "smpi/grow-injected-times": "no",
        "network/model": "CM02",
        "network/TCP-gamma": 0,
        **{f"smpi/{name}": f"0:{OVERHEAD:g}:0" for name in ("os", "ois", "or")},
        "smpi/host-speed": "10Gf",
        "smpi/privatization": "dlopen",
        "smpi/tmpdir": folder,
    }
    command = ["smpirun", *write_platform(folder, ranks), "--log=root.thres:critical"]
    command += [*(f"--cfg={name}:{value}" for name, value in settings.items()), str(binary), what]
    try:
        done = subprocess.run(
            ["timeout", "--kill-after=5", str(LIMIT_S), *command], capture_output=True, text=True
        )
    except OSError as error:
        sys.exit(f"tests/scale/run.py: {error}")
    rows = [line.split(None, 6) for line in done.stdout.splitlines() if line[:1].isdigit()]
    wrong = wrong_with(what, rows, ranks)
    if done.returncode:
        wrong = f"exit status {done.returncode}: {done.stderr[-2000:]}"
    if wrong:
        return Result(0, 0, 0.0, wrong)
    return Result(
        max(int(row[1]) + int(row[2]) for row in rows),
        max(int(row[3]) for row in rows),
        max(float(row[4]) for row in rows),
        "",
    )


def disagreement(what: str, found: Result, model: Cost) -> str:
    """Say how a model differs from the simulation; "" if it does not."""
    more = model.messages - found.messages
    if not 0 <= more <= (MORE if what == "late" else 0):
        return f"the model counts {model.messages} messages"
    if what in LONG:
        return ""
    factor = model.seconds / found.seconds
    if not 1 / FACTOR <= factor <= FACTOR:
        return f"the model takes {model.seconds * 1e6:.1f} us"
    return ""


def print_row(what: str, ranks: int, how: str, found: Result | Cost, took: float) -> None:
    """Print one line of the table."""
    seconds = "" if what in LONG else f"{found.seconds * 1e6:8.1f} us"
    size = f"{found.bytes:7d} B" if isinstance(found, Result) else ""
    row = f"{what:<14}{ranks:7d}  {how:<10}{found.messages:6d} messages {size:>9}{seconds:>12}"
    print(f"{row}   ({took:.1f} s)", flush=True)


def run_simulations(sizes: tuple[int, ...], results: dict[tuple[str, int], float]) -> list[str]:
    """Simulate every call in every size; returns what failed."""
    failed = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        binary = compile_ranks(folder)
        for what in LIMITS:
            for ranks in sizes:
                began = time.monotonic()
                found = simulate(binary, folder, what, ranks)
                print_row(what, ranks, "SMPI", found, time.monotonic() - began)
                problem = found.wrong
                if not problem and found.messages > LIMITS[what](ranks):
                    problem = f"{found.messages} messages, at most {LIMITS[what](ranks)} expected"
                if not problem and what in MODELS:
                    problem = disagreement(what, found, MODELS[what](ranks))
                if problem:
                    failed.append(f"{what}, {ranks} ranks: {problem}")
                results[what, ranks] = found.seconds * 1e6
    return failed


def run_models(sizes: tuple[int, ...], results: dict[tuple[str, int], float]) -> list[str]:
    """Compute every model in every size; returns what failed."""
    failed = []
    for what, model in MODELS.items():
        for ranks in sizes:
            began = time.monotonic()
            cost = model(ranks)
            print_row(what, ranks, "model", cost, time.monotonic() - began)
            if cost.messages > LIMITS[what](ranks):
                failed.append(f"{what}, {ranks} ranks: the model counts {cost.messages} messages")
            results[what, ranks] = cost.seconds * 1e6
    return failed


def plot(results: dict[tuple[str, int], float], path: Path) -> None:
    """Draw the time of each call over the number of ranks."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    # The same bytes for the same numbers; text as text, which is smaller than as shapes.
    pyplot.rcParams.update({"svg.hashsalt": "scale", "svg.fonttype": "none", "font.size": 9})
    figure, axes = pyplot.subplots(figsize=(5, 3))
    for what, label in (("start", "start"), ("group", "new group"), ("agree", "entry check")):
        for sizes, style in ((SIZES, "o"), ((*SIZES, *LARGE), "-")):
            values = [
                results[what, n] if style == "o" else MODELS[what](n).seconds * 1e6 for n in sizes
            ]
            color = {"start": "C0", "group": "C1", "agree": "C2"}[what]
            axes.plot(sizes, values, style, color=color, label=label if style == "-" else None)
    axes.set(xscale="log", xlabel="ranks", ylabel="us", ylim=0)
    axes.minorticks_off()
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None, "Creator": None})


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tests/scale/run.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--short", action="store_true", help="64 ranks, and the models of 1,024")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the plot there")
    options = parser.parse_args()
    if options.short and options.plot:
        parser.error("the plot needs all sizes: omit --short")
    absent = [command for command in ("smpicc", "smpirun") if not shutil.which(command)]
    if absent:
        sys.exit(
            f"tests/scale/run.py: {' and '.join(absent)} not found. In Debian: "
            "apt-get install libsimgrid-dev"
        )
    results: dict[tuple[str, int], float] = {}
    failed = run_simulations(SIZES[:1] if options.short else SIZES, results)
    failed += run_models(LARGE[:1] if options.short else LARGE, results)
    if options.plot:
        plot(results, options.plot)
    for line in failed:
        print(f"FAILED  {line}")
    print(f"{len(results)} calls, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
