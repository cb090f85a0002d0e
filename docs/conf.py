"""Settings of the site that scripts/docs builds: https://www.sphinx-doc.org/en/master/usage/configuration.html."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

project, author, copyright = "dpsgd", "the dpsgd authors", "the dpsgd authors"
html_title = "dpsgd"
extensions = [
    "myst_nb",
    "sphinx-mathjax-offline",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
nitpicky = True
exclude_patterns = ["_build"]

# Pages are Markdown; notebooks are shown with the outputs that they are stored with.
myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4
nb_execution_mode = "off"
nb_ipywidgets_js = {}  # of which the default is fetched from elsewhere

html_theme = "sphinx_book_theme"
html_theme_options = {"show_toc_level": 2, "use_download_button": False, "show_navbar_depth": 1}
html_static_path = ["_static"]
html_css_files = ["site.css"]
