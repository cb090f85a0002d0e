"""Settings of the site that scripts/docs builds: https://www.sphinx-doc.org/en/master/usage/configuration.html."""

import re
import sys
from pathlib import Path

from sphinx.ext.napoleon import Config, GoogleDocstring

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

project, author, copyright = "dpsgd", "the dpsgd authors", "the dpsgd authors"
html_title = "dpsgd"
extensions = [
    "myst_nb",
    "sphinx-mathjax-offline",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.viewcode",
]
nitpicky = True
exclude_patterns = ["_build"]

# Pages are Markdown; notebooks are shown with the outputs that they are stored with.
myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4
nb_execution_mode = "off"
nb_ipywidgets_js = {}  # of which the default is fetched from elsewhere

# Docstrings: text in the Google style, in which a name stands in single backticks.
default_role = "py:obj"
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
nitpick_ignore_regex = [("py:.*", r"(?s).*")]  # types that are not public, expressions

html_theme = "sphinx_book_theme"
html_theme_options = {"show_toc_level": 2, "use_download_button": False, "show_navbar_depth": 1}
html_static_path = ["_static"]
html_css_files = ["site.css"]


def to_rst(app, what, name, obj, options, lines):
    """Turns a docstring's sections and proofs into fields and links, and keeps its stars."""
    text = re.sub(r"docs/explanation/([\w-]+)\.md", r":doc:`/explanation/\1`", "\n".join(lines))
    text = re.sub(r"(?<![*\w])\*(?=\w[\w.]*[^\w.*])", r"\\*", text)
    lines[:] = GoogleDocstring(text, Config(napoleon_use_ivar=True), app, "function").lines()


def setup(app):
    """Connects them."""
    app.connect("autodoc-process-docstring", to_rst)
