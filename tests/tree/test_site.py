"""The documentation site: a place for every page, an entry for every name. `.ci/docs` builds it."""

from __future__ import annotations

import re
from importlib import import_module

import pytest
from places import ROOT

import hpcdist

pytestmark = [pytest.mark.local, pytest.mark.any_mpi]

DOCS = ROOT / "docs"
#: Modules whose names all have an entry.
MODULES = (
    "hpcdist", "hpcdist.nn.functional", "hpcdist.parallel", "hpcdist.parallel.averaging",
    "hpcdist.parallel.comm_hooks", "hpcdist.optim", "hpcdist.testing", "hpcdist.torch",
    "hpcdist.startup.spawn", "hpcdist.config",
)  # fmt: skip


def entries() -> set[str]:
    """The full names in the API pages."""
    found = set()
    for page in DOCS.glob("api/*.rst"):
        blocks = re.findall(
            r"^\.\. names:: (\S+)\n\n((?:   \w+\n)+)", page.read_text() + "\n", re.M
        )
        for module, names in blocks:
            found |= {f"{module}.{name}" for name in names.split()}
    return found


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_in_the_api_reference(module):
    named = entries()
    objects = {name: getattr(import_module(module), name) for name in import_module(module).__all__}
    # a name may have its entry where it is exported first
    elsewhere = {id(getattr(import_module(path.rpartition(".")[0]), path.rpartition(".")[2]))
                 for path in named}  # fmt: skip
    missing = [
        name
        for name, thing in objects.items()
        if f"{module}.{name}" not in named and id(thing) not in elsewhere
    ]
    assert not missing, f"name them in docs/api/*.rst: {missing}"


def test_no_entry_is_stale():
    for path in entries():
        module, _, name = path.rpartition(".")
        assert hasattr(import_module(module), name), path


def test_every_page_is_in_the_table_of_contents():
    index = (DOCS / "index.md").read_text()
    placed = set(re.findall(r"^(?!:)(\S+)$", index, re.M))
    assert {page.stem for page in DOCS.glob("*.md")} - {"index"} <= placed
    listed = (DOCS / "api" / "index.rst").read_text()
    assert {page.stem for page in DOCS.glob("api/*.rst")} - {"index"} <= set(listed.split())


def test_the_extra_has_what_the_settings_use():
    project = (ROOT / "pyproject.toml").read_text()
    extra = re.search(r"^docs = \[(.*?)\]", project, re.M | re.S)[1]
    settings = (DOCS / "conf.py").read_text()
    for package, word in (("myst-parser", "myst_parser"), ("furo", "furo"),
                          ("sphinx-copybutton", "sphinx_copybutton")):  # fmt: skip
        assert package in extra and word in settings
    assert hpcdist.__version__
