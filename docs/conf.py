"""Sphinx's settings. The site is built by build.py, which copies the pages first."""

from __future__ import annotations

from docstrings import process

from isotype import __version__

project, author = "Isotype", "the Isotype contributors"
copyright = "the Isotype contributors, Apache License 2.0"
version = release = __version__
root_doc = "docs/index"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = f"Isotype {version}"
html_copy_source = False
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 100
# outputs of commands inside a ```python block of a code's page
suppress_warnings = ["misc.highlighting_failure"]


def setup(app):
    app.connect("autodoc-process-docstring", process)
