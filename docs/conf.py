"""Configuration of the documentation site: `sphinx-build -W --keep-going -b html docs docs/_build/html`."""

import sys
from pathlib import Path

import acclimate

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "acclimate"
release = version = acclimate.__version__
exclude_patterns = ["_build", "README.md"]

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "acclimate_docs", "mathml"]

# Everything that a page refers to must exist.
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(?!acclimate\b).*")]  # names of other packages, of which there is no list offline
nitpick_ignore = [  # variables and aliases of types
    ("py:class", "acclimate.core.adapter.T"),
    ("py:class", "acclimate.core.registry.M"),
    ("py:class", "acclimate.data._formulas.Random"),
]
default_role = "code"  # docstrings have `code` as Markdown has it

myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 4

nb_execution_mode = "cache"  # executes a notebook again when it has changed; in a fresh clone all of them
nb_execution_in_temp = True  # what a notebook writes is not left here
nb_execution_timeout = 240
nb_execution_raise_on_error = True
nb_output_stderr = "remove"  # progress, and warnings with the paths of the machine that builds the site

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

# Furo is small and maintained, has light and dark, and loads nothing from the network.
html_theme = "furo"
html_title = "acclimate"
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
