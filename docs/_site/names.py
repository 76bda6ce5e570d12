"""Directives of the API pages.

``names`` gives an overview of some names of a module, then each with its docstring::

    .. names:: hpcdist

       all_reduce
       reduce

``modules-table`` lists modules with their names.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


class Names(SphinxDirective):
    """Writes an ``autosummary`` and the ``auto...`` directive of each name."""

    has_content = True
    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        path = self.arguments[0]
        module = import_module(path)
        names = [line.strip() for line in self.content if line.strip()]
        lines = [f".. currentmodule:: {path}", "", ".. autosummary::", "   :nosignatures:", ""]
        lines += [f"   {name}" for name in names]
        for name in names:
            lines += ["", f".. {_directive(getattr(module, name))}:: {path}.{name}"]
            if inspect.isclass(getattr(module, name)):
                lines.append("   :show-inheritance:")
            elif inspect.ismodule(getattr(module, name)):
                lines.append("   :no-members:")
        return self.parse_text_to_nodes("\n".join(lines))


class ModulesTable(SphinxDirective):
    """Lists modules with their names, each a link to where it is documented."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        lines = []
        for path in (line.strip() for line in self.content if line.strip()):
            module = import_module(path)
            names = [name for name in module.__all__ if not name.startswith("_")]
            links = ", ".join(f":py:obj:`{name}`" for name in names)
            lines += [f"``{path}``", f"   {links}", ""]
        return self.parse_text_to_nodes("\n".join(lines))


def _directive(thing: Any) -> str:
    if inspect.isclass(thing):
        return "autoexception" if issubclass(thing, BaseException) else "autoclass"
    if inspect.ismodule(thing):
        return "automodule"
    return "autofunction" if callable(thing) else "autodata"


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("names", Names)
    app.add_directive("modules-table", ModulesTable)
    return {"parallel_read_safe": True}
