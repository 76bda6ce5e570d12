"""Tables: as nccl-tests and the OSU benchmarks print them, as CSV and as JSON."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from .job import MpiJob

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Parameters
    ----------
    key : str
        Its name in CSV and JSON, with the unit, and in the rows.
    heading : str
        What stands above it in a table for people; empty leaves it out there.
    unit : str
        What stands below the heading.
    width : int
        Characters.
    form : str
        Format specification of its values; they are aligned to the right.
    """

    key: str
    heading: str = ""
    unit: str = ""
    width: int = 10
    form: str = ""

    def text(self, value: Any) -> str:
        """Return a value in its printed form, None as N/A, in at least `width` characters."""
        shown = "N/A" if value is None else format(value, self.form)
        return f"{shown:>{self.width}}"


@dataclass(frozen=True)
class Pivot:
    """How the rows of a section become lines with a column for each library, as OSU prints them.

    Parameters
    ----------
    start, head, value : str
        Keys of the column that begins a line, of the one whose values head the others, and of what
        stands below.
    """

    start: str
    head: str
    value: str


class Table:
    """The printed table, on rank 0; other ranks print nothing.

    Rows are printed as they come, but for JSON, which is one object at the end.

    Parameters
    ----------
    job : MpiJob
        The ranks.
    columns : sequence of Column
        Of a row.
    form : {"nccl", "osu", "csv", "json"}
        How it looks. ``osu`` needs a pivot in each section.
    output : str, optional
        File to write; standard output by default.
    """

    def __init__(
        self,
        job: MpiJob,
        columns: Sequence[Column],
        form: str = "nccl",
        output: str | None = None,
    ) -> None:
        self._job = job
        self._columns = list(columns)
        self._form = form
        self._pivot = Pivot("", "", "")
        self._heads: list[str] = []
        self._rows: list[dict[str, Any]] = []
        self._notes: list[str] = []
        self._facts: dict[str, str] = {}
        self._file: TextIO | None = None
        self._line: dict[Any, Any] = {}
        problem = None
        if job.first:
            try:
                self._file = open(output, "w") if output else sys.stdout
            except OSError as error:
                problem = f"cannot write {output}: {error.strerror}"
        job.require(problem)
        self._owned = bool(output)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """list of dict: all rows so far, on rank 0."""
        return self._rows

    @property
    def facts(self) -> dict[str, str]:
        """dict: what `begin` was given."""
        return self._facts

    def begin(self, facts: Mapping[str, str]) -> None:
        """Print the conditions of the measurement."""
        self._facts = dict(facts)
        if self._form != "json":
            for name, text in facts.items():
                self._print(f"# {name}: {text}")
        if self._form == "csv" and self._file is not None:
            csv.writer(self._file).writerow([column.key for column in self._columns])
            self._file.flush()

    def section(self, title: str, pivot: Pivot | None = None, heads: Sequence[str] = ()) -> None:
        """Begin a block of rows, with the headings above it.

        Parameters
        ----------
        title : str
            What the rows have in common.
        pivot : Pivot, optional
            For ``osu``.
        heads : sequence of str
            For ``osu``: the columns to come.
        """
        self._flush_line()
        self._pivot, self._heads = pivot or self._pivot, list(heads)
        if self._form == "nccl":
            shown = [column for column in self._columns if column.heading]
            self._print(f"#\n# {title}\n#")
            head = "".join(f"{column.heading:>{column.width}}" for column in shown)
            unit = "".join(
                f"{f'({column.unit})' if column.unit else '':>{column.width}}" for column in shown
            )
            self._print("#" + head[1:])
            self._print("#" + unit[1:])
        elif self._form == "osu":
            unit = next((c.unit for c in self._columns if c.key == self._pivot.value), "")
            self._print(f"\n# {title}, {unit}")
            self._print(f"{'# Size':<12}" + "".join(f"{head:>20}" for head in heads))

    def row(self, values: Row) -> None:
        """Print a row: its values by the keys of the columns."""
        row = {column.key: values[column.key] for column in self._columns}
        self._rows.append(row)
        if self._form == "nccl":
            shown = [column for column in self._columns if column.heading]
            self._print("".join(column.text(row[column.key]) for column in shown))
        elif self._form == "csv" and self._file is not None:
            csv.writer(self._file).writerow(["" if v is None else v for v in row.values()])
            self._file.flush()
        elif self._form == "osu":
            keys = self._pivot.start, self._pivot.head, self._pivot.value
            start, head, value = (row[key] for key in keys)
            if self._line and self._line[""] != start:
                self._flush_line()
            self._line[""] = start
            self._line[head] = value

    def note(self, text: str) -> None:
        """Print a remark of one line."""
        self._flush_line()
        self._notes.append(text)
        if self._form != "json":
            self._print(f"# {text}")

    def end(self) -> None:
        """Print the rest, and close the file."""
        self._flush_line()
        if self._form == "json" and self._file is not None:
            whole = {"facts": self._facts, "notes": self._notes, "rows": self._rows}
            json.dump(whole, self._file, indent=1)
            self._file.write("\n")
        if self._file is not None:
            self._file.flush()
            if self._owned:
                self._file.close()

    def _flush_line(self) -> None:
        """The line of ``osu`` that was being filled."""
        if self._line:
            cells = [self._line.get(head) for head in self._heads]
            texts = "".join(f"{'N/A' if cell is None else f'{cell:.2f}':>20}" for cell in cells)
            self._print(f"{self._line['']:<12}" + texts)
            self._line = {}

    def _print(self, line: str) -> None:
        if self._file is not None:
            print(line, file=self._file, flush=True)


def short(size: int) -> str:
    """Bytes in the usual short form, ``8``, ``64K`` or ``25M``; exact, unless they fit no unit."""
    for unit, factor in (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if size >= factor:
            whole = size / factor
            return f"{whole:g}{unit}" if whole == int(whole) else f"{whole:.1f}{unit}"
    return str(size)
