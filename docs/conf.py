"""Settings of the documentation site; `docs/build.py` builds it."""

from __future__ import annotations

import sys
from importlib.metadata import version as _version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_site"))

project = "hpcdist"
author = "hpcdist developers"
copyright = author
release = version = _version("hpcdist")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "names",
    "repository",
]

# The sources are the root of the repository: links between pages and to files are the same there,
# on GitHub and here.
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**", "jobscripts/README.md"]
exclude_patterns = ["docs/_site/**"]

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
# What `repository` writes for links to files that are no pages.
myst_url_schemes = {"http": None, "https": None, "file-page": "{{path}}"}

autodoc_default_options = {"members": True, "member-order": "groupwise"}
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autosummary_generate = False
napoleon_google_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_preprocess_types = True
python_use_unqualified_type_names = True
python_display_short_literal_types = True
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"hpcdist {release}"
html_static_path = ["_site/static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True
