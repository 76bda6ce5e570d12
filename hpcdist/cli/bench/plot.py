"""Draw a bench: time and bandwidth over size, one line for each library. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .formats import Table, short
from .job import MpiJob

_COLOURS = {
    "hpcdist": "#c0392b",
    "hpcdist-off": "#e59866",
    "hpcdist-fast": "#d4ac0d",
    "hpcdist-async": "#8e44ad",
    "c": "#2c3e50",
    "c-async": "#85929e",
    "floor": "#27ae60",
    "mpi4py": "#2980b9",
    "gloo": "#7f8c8d",
}
#: Key of the bandwidth -> what stands at its axis.
_BANDWIDTHS = {"busbw_GBps": "bus bandwidth, GB/s", "bandwidth_MBps": "bandwidth, MB/s"}


def ready(job: MpiJob, path: str | None) -> None:
    """Find out before measuring whether a plot can be drawn. All ranks must call it.

    BenchError on all of them if matplotlib is missing or the file cannot be written. No path, no
    plot.
    """
    problem = None
    if path is not None and job.first:
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure

            known = FigureCanvasAgg(Figure()).get_supported_filetypes()
            ending = path.rpartition(".")[2].lower()
            if ending not in known:
                problem = f"--plot {path}: matplotlib writes {', '.join(sorted(known))}"
            else:
                with open(path, "ab"):
                    pass
        except ImportError:
            problem = '--plot needs matplotlib: pip install "hpcdist[plot]"'
        except OSError as error:
            problem = f"cannot write {path}: {error.strerror}"
    job.require(problem)


def draw(job: MpiJob, table: Table, path: str | None) -> None:
    """Draw what a table holds, on rank 0: a row of two pictures for each operation.

    The path's ending says in which format; None for no plot.
    """
    if path is None or not job.first:
        return
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys(_title(row) for row in table.rows if row["size_bytes"]))
    if not kinds:
        return
    figure = Figure(figsize=(10, 3.6 * len(kinds)), layout="constrained")
    pictures = figure.subplots(len(kinds), 2, squeeze=False)
    for title, (left, right) in zip(kinds, pictures, strict=True):
        rows = [row for row in table.rows if _title(row) == title]
        bandwidth = next(key for key in _BANDWIDTHS if key in rows[0])
        _lines(left, rows, "time_us")
        left.set(title=title, ylabel="time of a call, µs", yscale="log")
        _lines(right, rows, bandwidth)
        right.set(title=title, ylabel=_BANDWIDTHS[bandwidth])
        left.legend(frameon=False)
    facts = table.facts
    figure.suptitle(f"{facts['ranks']}; {facts['MPI']}; {facts['date']}", fontsize=9)
    figure.savefig(path, dpi=80)
    job.say(f"# plot: {path}")


def _title(row: dict[str, Any]) -> str:
    words = [row["operation"], row["type"]]
    if row.get("redop", "none") != "none":
        words.append(row["redop"])
    return ", ".join(words)


def _lines(axes: Any, rows: Sequence[dict[str, Any]], key: str) -> None:
    """One line a library, over sizes in powers of two."""
    for library in dict.fromkeys(row["library"] for row in rows):
        points = [(row["size_bytes"], row[key]) for row in rows if row["library"] == library]
        axes.plot(
            *zip(*points, strict=True),
            marker="o",
            markersize=3,
            linewidth=1.3,
            label=library,
            color=_COLOURS.get(library),
        )
    axes.set_xscale("log", base=2)
    sizes = sorted({row["size_bytes"] for row in rows})
    chosen = sizes[:: max(1, len(sizes) // 6)]
    axes.set_xticks(chosen, [short(size) for size in chosen])
    axes.minorticks_off()
    axes.set_xlabel("bytes")
    axes.grid(alpha=0.3)
