"""Tables: as nccl-tests and the OSU benchmarks print them, as CSV and as JSON."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from .job import Job

__all__ = ["Column", "Table", "short"]

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
        """A value as it is printed.

        Parameters
        ----------
        value : object
            None is printed as N/A.

        Returns
        -------
        str
            At least `width` characters.
        """
        shown = "N/A" if value is None else format(value, self.form)
        return f"{shown:>{self.width}}"


class Table:
    """What rank 0 prints; on other ranks nothing happens.

    Rows are printed as they come, but for JSON, which is one object at the end.

    Parameters
    ----------
    job : Job
        The ranks.
    columns : sequence of Column
        Of a row.
    form : {"nccl", "osu", "csv", "json"}
        How it looks. ``osu`` needs `pivot`.
    output : str, optional
        File to write; standard output by default.
    pivot : tuple of str, optional
        For ``osu``: keys of the column that begins a line, of the column whose values head the
        others, and of the value.
    """

    def __init__(
        self,
        job: Job,
        columns: Sequence[Column],
        form: str = "nccl",
        output: str | None = None,
        pivot: tuple[str, str, str] | None = None,
    ) -> None:
        self._job = job
        self._columns = list(columns)
        self._form = form
        self._pivot = pivot
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

    def begin(self, facts: Mapping[str, str]) -> None:
        """Print what the numbers rest on.

        Parameters
        ----------
        facts : mapping
            Name -> text.
        """
        self._facts = dict(facts)
        if self._form != "json":
            for name, text in facts.items():
                self._print(f"# {name}: {text}")
        if self._form == "csv" and self._file is not None:
            csv.writer(self._file).writerow([column.key for column in self._columns])
            self._file.flush()

    def section(self, title: str, heads: Sequence[str] = ()) -> None:
        """Begin a block of rows, with the headings above it.

        Parameters
        ----------
        title : str
            What the rows have in common.
        heads : sequence of str
            For ``osu``: the columns to come.
        """
        self._flush_line()
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
            self._heads = list(heads)
            self._print(f"\n# {title}")
            self._print(f"{'# Size':<12}" + "".join(f"{head:>20}" for head in heads))

    def row(self, values: Row) -> None:
        """Print a row.

        Parameters
        ----------
        values : mapping
            Key of a column -> value.
        """
        row = {column.key: values[column.key] for column in self._columns}
        self._rows.append(row)
        if self._form == "nccl":
            shown = [column for column in self._columns if column.heading]
            self._print("".join(column.text(row[column.key]) for column in shown))
        elif self._form == "csv" and self._file is not None:
            csv.writer(self._file).writerow(["" if v is None else v for v in row.values()])
            self._file.flush()
        elif self._form == "osu":
            assert self._pivot is not None
            start, head, value = (row[key] for key in self._pivot)
            if self._line and self._line[""] != start:
                self._flush_line()
            self._line[""] = start
            self._line[head] = value

    def note(self, text: str) -> None:
        """Print a remark.

        Parameters
        ----------
        text : str
            One line.
        """
        self._flush_line()
        self._notes.append(text)
        if self._form != "json":
            self._print(f"# {text}")

    def end(self) -> None:
        """Print what is left, and close the file."""
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
    """Bytes as people write them: ``8``, ``64K``, ``25M``.

    Parameters
    ----------
    size : int
        Bytes.

    Returns
    -------
    str
        Exact, unless the size is no multiple of a unit.
    """
    for unit, factor in (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if size >= factor:
            whole = size / factor
            return f"{whole:g}{unit}" if whole == int(whole) else f"{whole:.1f}{unit}"
    return str(size)
