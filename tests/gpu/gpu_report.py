"""The results of run.py, written as they come."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

#: How a status is shown in the table, where the result alone would not tell it.
SHOWN = {"ok": "", "not run": "not run: ", "not rehearsed": "not rehearsed: "}
FAILED = ("failed", "crashed", "hung", "interrupted")


@dataclass
class Result:
    """How a row ended.

    Attributes
    ----------
    row, status : str
        Its name; "ok", "not run", "not rehearsed" or one of `FAILED`.
    result : str
        For the table; lines after the first are printed below it.
    seconds : float
        What it took.
    tail : list of str
        The last lines of its output, if it failed.
    """

    row: str
    status: str
    result: str
    seconds: float = 0.0
    tail: list[str] = field(default_factory=list)

    def line(self) -> str:
        """Its line of the table."""
        first = self.result.strip().partition("\n")[0].replace("|", "/")
        shown = SHOWN.get(self.status, f"{self.status.upper()}: ")
        return f"| {self.row} | {shown}{first} |"

    def below(self) -> str:
        """What is printed below the table, or nothing."""
        rest = self.result.strip().partition("\n")[2]
        lines = ([rest] if rest else []) + (self.tail if self.status in FAILED else [])
        if not lines:
            return ""
        return "\n".join([f"\n{self.row}:\n", "```text", *lines, "```"])


class Report:
    """Prints each result, and keeps it in two files if there is a folder for them.

    ``rows.jsonl`` gets a line for each result; ``table.md`` is written again after each, so that
    it is whole whenever this process is ended.
    """

    def __init__(self, header: str, folder: Path | None) -> None:
        self.header = f"{header}\n\n| what | result |\n|---|---|"
        self.folder, self.results = folder, list[Result]()
        print(self.header, flush=True)

    def add(self, result: Result) -> None:
        """Take a result."""
        self.results.append(result)
        print(result.line(), flush=True)
        if self.folder is None:
            return
        with (self.folder / "rows.jsonl").open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        draft = self.folder / "table.md.new"
        draft.write_text(f"{self.text()}\n")
        draft.replace(self.folder / "table.md")

    def text(self) -> str:
        """The table, and what belongs below it."""
        lines = [each.line() for each in self.results]
        return "\n".join([self.header, *lines, *filter(None, (r.below() for r in self.results))])

    def close(self) -> int:
        """Print what belongs below the table, and return the exit status."""
        for each in self.results:
            if each.below():
                print(each.below())
        counts = {each.status: 0 for each in self.results}
        for each in self.results:
            counts[each.status] += 1
        print("\n" + ", ".join(f"{count} {status}" for status, count in counts.items()), flush=True)
        return 1 if any(each.status in FAILED for each in self.results) else 0
