"""Configure Sphinx. `make docs` builds the site in docs/_build/html. It fetches nothing, and a broken link is an error."""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))

import hwfsdp  # noqa: E402

# The web address of the repository, such as "https://github.com/ada/hwfsdp". Who publishes it writes it here, once, and runs
# `make notebooks NB=--text`. Then each notebook has a link that opens it on a hosted notebook, and a cell that installs hwfsdp there.
# Without it, pages link to the address that git knows.
repository = ""
project, author = "hwfsdp", "The hwfsdp authors"
copyright = "The hwfsdp authors"
version = release = hwfsdp.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "book", "players", "finish"]
exclude_patterns = ["_build", "README.md"]
templates_path = ["_templates"]
html_theme = "furo"
html_title = "hwfsdp"
html_additional_pages = {"404": "404.html"}
html_static_path = ["_static"]
# The script enlarges pictures on a click, and adds boxes for predictions.
html_favicon = "_static/favicon.svg"  # the player has the same
myst_html_meta = {
    "description": "A small, readable implementation of PyTorch's FSDP2, with a course, recordings of training steps, and virtual GPUs"
}
html_css_files, html_js_files = ["site.css"], ["site.js"]
nb_execution_mode = "off"  # notebooks come with their outputs
nb_merge_streams = True  # what a cell prints in several pieces is one block
myst_heading_anchors = 3
default_role = "code"
highlight_language = "none"  # drawings of characters are not Python
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
napoleon_use_ivar = True
