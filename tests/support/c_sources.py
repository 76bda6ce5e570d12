"""What the C sources of a folder define, include and use: enough of a parser, without a compiler.

The names of all functions that another file may call begin with ``hd_``. So a file uses another one
where such a name stands in one of its functions, also as a pointer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

_IGNORED = re.compile(
    r"""/\*.*?\*/ | //[^\n]* | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])+'""", re.DOTALL | re.VERBOSE
)
_DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)
_INCLUDE = re.compile(r'^#include "(\w+)\.h"', re.MULTILINE)
_PARENTHESES = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
_ATTRIBUTE = r"(?:\s*__attribute__\s*" + _PARENTHESES + ")*"
_FUNCTION = re.compile(r"(\w+)\s*" + _PARENTHESES + _ATTRIBUTE + r"\s*$")
_VARIABLE = re.compile(r"\b(hd_\w+)\s*(?:\[[^\]]*\])?\s*(?:=.*)?$", re.DOTALL)
_NAME = re.compile(r"\bhd_\w+")


@dataclass
class Source:
    """A C file or a header, without comments and texts."""

    path: Path
    #: Name -> (lines, body) of its functions.
    functions: dict[str, tuple[int, str]] = field(default_factory=dict)
    #: What it only declares.
    prototypes: set[str] = field(default_factory=set)
    #: Its functions and variables that other files see.
    public: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        text = self.path.read_text()
        self.includes = set(_INCLUDE.findall(text))
        blanked = _IGNORED.sub(_blank, text)
        self.macros = " ".join(_DIRECTIVE.findall(blanked))
        self._read(_DIRECTIVE.sub(_blank, blanked))

    def uses(self) -> set[str]:
        """Return the names with ``hd_`` in its functions and macros."""
        bodies = [body for _, body in self.functions.values()]
        return {name for text in (*bodies, self.macros) for name in _NAME.findall(text)}

    def _read(self, text: str) -> None:
        """Cut the text at its outermost braces and semicolons."""
        depth = start = begin = 0
        for mark in re.finditer(r"[{};]", text):
            if mark[0] == "{":
                begin = mark.end() if depth == 0 else begin
                depth += 1
            elif mark[0] == "}":
                depth -= 1
                if depth == 0 and self._define(text[start : begin - 1], text[begin : mark.start()]):
                    start = mark.end()
            elif depth == 0:
                self._declare(text[start : mark.start()])
                start = mark.end()

    def _define(self, head: str, body: str) -> bool:
        found = _FUNCTION.search(head)
        if not found:
            return False
        self.functions[found[1]] = (head.strip().count("\n") + body.count("\n") + 1, body)
        if "static" not in head.split() or self.path.suffix == ".h":
            self.public.add(found[1])
        return True

    def _declare(self, text: str) -> None:
        words = text.split()
        if (
            not words
            or words[0] in ("typedef", "static", "struct", "enum")
            or "_Static_assert" in text
        ):
            return
        function = _FUNCTION.search(text)
        if function:
            self.prototypes.add(function[1])
        elif words[0] != "extern" and (variable := _VARIABLE.search(text)):
            self.public.add(variable[1])


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def sources(folder: Path) -> list[Source]:
    """Return the C files and headers of a folder and those in it."""
    return [Source(path) for path in sorted(folder.rglob("hd_*.[ch]"))]


def uses_between(files: list[Source]) -> dict[str, dict[str, set[str]]]:
    """Return module -> module -> names: which file uses which, by includes, calls and variables.

    A module is a C file with the header of the same name, or a header alone.
    """
    owner = {name: file.path.stem for file in files for name in file.public}
    edges: dict[str, dict[str, set[str]]] = {}
    for file in files:
        stem = file.path.stem
        edge = edges.setdefault(stem, {})
        for other in file.includes - {stem}:
            edge.setdefault(other, set()).add(f"{other}.h")
        for name in file.uses():
            if owner.get(name, stem) != stem:
                edge.setdefault(owner[name], set()).add(name)
    return edges


def circles(edges: dict[str, dict[str, set[str]]]) -> list[list[str]]:
    """Return modules that use each other, directly or through others."""
    reach = {module: set(used) for module, used in edges.items()}
    changed = True
    while changed:
        changed = False
        for seen in reach.values():
            more = set().union(*(reach.get(other, set()) for other in seen)) - seen
            if more:
                seen |= more
                changed = True
    rings = {
        tuple(sorted(other for other in reach if other in reach[module] and module in reach[other]))
        for module in reach
        if module in reach[module]
    }
    return [list(ring) for ring in sorted(rings)]
