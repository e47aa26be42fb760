"""Sphinx: `make docs` builds these pages, plain Markdown, as a site."""

from pathlib import Path

project = "summit_train"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
autodoc_member_order = "bysource"
default_role = "code"  # in docstrings, as in Markdown
html_theme = "furo"
html_title = "summit_train"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_search_scorer = str(Path(__file__).with_name("_static") / "search.js")
highlight_language = "none"  # Blocks that name no language are commands with their output.
myst_heading_anchors = 3  # GitHub's anchors, so that links work unbuilt too.
