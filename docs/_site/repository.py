"""Links to files of the repository that are no pages of the site: each file gets a page.

On GitHub ``[name](../tests/x.py)`` opens the file. Here it opens a page with its text; a link to a
folder opens a list of its files.
"""

from __future__ import annotations

import html
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_for_filename
from pygments.lexers.special import TextLexer
from pygments.util import ClassNotFound
from sphinx.application import Sphinx

#: The folder of these pages on the site.
_PAGES = "files"
_LINK = re.compile(r"(?<=\]\()([^)\s:#]+)(?=\))")
_FENCE = re.compile(r"(^```.*?^```$)", re.M | re.S)

_wanted: set[str] = set()


def rewrite(app: Sphinx, docname: str, source: list[str]) -> None:
    """Let the links of a page lead to the pages of files."""
    if not app.env.doc2path(docname).suffix == ".md":
        return
    folder = posixpath.dirname(docname)

    def target(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match[0]))
        there = Path(app.srcdir, path)
        if not there.exists() or app.env.path2doc(path) in app.env.found_docs:
            return match[0]
        if there.suffix in (".svg", ".png"):
            return match[0]
        _wanted.add(path)
        return f"file-page:{posixpath.relpath(f'{_PAGES}/{path}.html', folder or '.')}"

    parts = _FENCE.split(source[0])
    parts[::2] = [_LINK.sub(target, part) for part in parts[::2]]
    source[0] = "".join(parts)


def pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Give the pages of the files that were linked to, and of the files in linked folders."""
    folders = [path for path in _wanted if Path(app.srcdir, path).is_dir()]
    for folder in folders:
        _wanted.update(f"{folder}/{path.name}" for path in _files(Path(app.srcdir, folder)))
    for path in sorted(_wanted):
        there = Path(app.srcdir, path)
        body = _listing(there) if there.is_dir() else _text(there)
        title = html.escape(path)
        yield f"{_PAGES}/{path}", {"title": title, "body": f"<h1>{title}</h1>{body}"}, "page.html"


def _files(folder: Path) -> list[Path]:
    """The files of a folder that a reader may look at."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.suffix in (".py", ".sh", ".c", ".h", ".md") and path.is_file()
    )


def _listing(folder: Path) -> str:
    names = [html.escape(path.name) for path in _files(folder)]
    links = [f'<li><a href="{folder.name}/{name}.html">{name}</a></li>' for name in names]
    return f"<ul>{''.join(links)}</ul>"


def _text(path: Path) -> str:
    try:
        lexer = get_lexer_for_filename(path.name)
    except ClassNotFound:
        lexer = TextLexer()
    return highlight(path.read_text(), lexer, HtmlFormatter(linenos=False))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", rewrite)
    app.connect("html-collect-pages", pages)
    return {"parallel_read_safe": False}
