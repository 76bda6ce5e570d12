"""The analysis as one page of HTML that needs nothing else."""

from __future__ import annotations

import json
import re
from html import escape
from pathlib import Path
from typing import Any

from .text import lines


def page(found: dict[str, Any], bars: list[dict[str, Any]]) -> str:
    """Return a page with a timeline of all operations, and the text of the analysis.

    Parameters
    ----------
    found : dict
        Of :func:`hpcdist.recordings.analysis.report.analysis`.
    bars : list of dict
        Of :func:`hpcdist.recordings.analysis.bars.timeline`.

    Returns
    -------
    str
        HTML; it loads nothing.
    """
    begin = min((bar["begin"] for bar in bars), default=0)
    shown = [
        {
            **bar,
            "begin": (bar["begin"] - begin) / 1000,
            "end": (bar["end"] - begin) / 1000,
            "agreed": None if bar["agreed"] is None else (bar["agreed"] - begin) / 1000,
        }
        for bar in bars
    ]
    # "<" would end the script in a file name like </script>
    data = json.dumps({"bars": shown, "ranks": sorted({bar["rank"] for bar in bars})})
    stacks = "".join(
        f"<details><summary>Stacks of rank {one['rank']}</summary>"
        f"<pre>{escape(one['stacks'])}</pre></details>"
        for one in found["processes"]
        if one["stacks"]
    )
    form = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
    values = {
        "TITLE": escape(f"hpcdist job {found['job']}"),
        "TEXT": escape("\n".join(lines(found))),
        "STACKS": stacks,
        "DATA": data.replace("<", "\\u003c"),
    }
    return re.sub(r"@([A-Z]+)@", lambda found: values[found[1]], form)
