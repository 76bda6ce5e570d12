"""Build the documentation site: python docs/build.py [FOLDER].

It needs hpcdist with its extra `docs`, and no network. A warning fails the build.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from sphinx.cmd.build import main as sphinx

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "docs"
#: The start page is docs/index.html, as on GitHub it is docs/index.md.
START = '<!DOCTYPE html><meta http-equiv="refresh" content="0; url=docs/index.html">\n'


def main(folder: Path) -> int:
    """Build into a folder; the exit status of Sphinx.

    Not with ``python -m sphinx``, which would import the sources here instead of the installed
    package.
    """
    options = ["-W", "--keep-going", "-q", "-E", "-b", "html", "-c", str(ROOT / "docs")]
    status = sphinx([*options, str(ROOT), str(folder)])
    if status:
        return status
    missing = not_found(folder)
    if missing:
        print(f"the search does not find: {', '.join(missing)}: name them in docs/api/*.rst")
        return 1
    (folder / "index.html").write_text(START)
    print(f"the site is in {folder}: open {folder / 'docs' / 'index.html'}")
    return 0


def not_found(folder: Path) -> list[str]:
    """The public names of hpcdist that the index of the site's search lacks."""
    import hpcdist

    text = (folder / "searchindex.js").read_text()
    objects = json.loads(re.search(r"^Search\.setIndex\((.*)\)$", text, re.S)[1])["objects"]
    found = {entry[-1] for entry in objects["hpcdist"]}
    return sorted(set(hpcdist.__all__) - found)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER))
