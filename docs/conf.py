"""Sphinx: `make docs` builds these pages, plain Markdown, as a site."""

project = "summit_train"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
autodoc_member_order = "bysource"
default_role = "code"  # in docstrings, as in Markdown
html_theme = "furo"
html_title = "summit_train"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
highlight_language = "none"  # Blocks that name no language are commands with their output.
myst_heading_anchors = 3  # GitHub's anchors, so that links work unbuilt too.
