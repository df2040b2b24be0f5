"""Sphinx configuration. `make docs` builds with warnings as errors; no page needs the network."""

from importlib.metadata import version as installed

project = "keepstep"
author = "the keepstep authors"
copyright = "2026, the keepstep authors"
version = release = installed("keepstep")

extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "README.md"]
myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"keepstep {release}"
html_static_path: list[str] = []
html_theme_options = {"navigation_with_keys": True}
pygments_style = "friendly"
