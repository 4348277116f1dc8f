"""Sphinx configuration: `sphinx-build -W docs docs/_build`. Pages are plain Markdown."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # a source tree that is not installed

project = "megatron-dcp"
author = "The megatron-dcp authors"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "megatron-dcp"
exclude_patterns = ["_build"]
# The API page is made without built extensions; torch has to be there.
autodoc_mock_imports = ["megatron_dcp._planner", "megatron_dcp.ops"]
autodoc_typehints = "description"
autodoc_member_order = "bysource"
