"""Settings of the site that scripts/docs builds; Sphinx's manual explains each."""

import os
import re

from sphinx.ext.napoleon import Config, GoogleDocstring

from experiments import cli

project, author, copyright = "dpsgd", "the dpsgd authors", "the dpsgd authors"
extensions = [
    "myst_nb",
    "sphinx-mathjax-offline",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build"]
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?s).*")]  # types that are not public, and expressions

# Pages are Markdown; notebooks are shown with the outputs that they are stored with.
myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_dmath_double_inline = True
myst_heading_anchors = 4
nb_execution_mode = "off"
nb_ipywidgets_js = {}  # of which the default is fetched from elsewhere

# Docstrings are in the Google style; a name stands in single backticks.
default_role = "py:obj"
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
toc_object_entries = False  # a third of the time; tables at the top of a page lead to its entries
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80

html_title = "dpsgd"
html_theme = "sphinx_book_theme"
html_theme_options = {"show_toc_level": 2, "use_download_button": False}
html_context = {"default_mode": "auto"}
html_favicon = "_static/logo.svg"
html_static_path = ["_static"]
html_css_files = ["site.css"]

COMMAND = "reference/command"
"""The page that is made of the program's own help."""


def as_rst(app, what, name, obj, options, lines):
    """Makes fields, links and formulas of a docstring; a star stays a star."""
    text = re.sub(r"docs/explanation/([\w-]+)\.md", r":doc:`/explanation/\1`", "\n".join(lines))
    text = re.sub(r"(?<![*\w])\*(?=\w[\w.]*[^\w.*])", r"\\*", text)
    text = str(GoogleDocstring(text, Config(napoleon_use_ivar=True), app, "function"))
    lines[:] = re.sub(r"\$+\s*([^$]+?)\s*\$+", r":math:`\1`", text).splitlines()


def without_ranges(app, what, name, obj, options, signature, returned):
    """Returns a signature whose types are shown without their ranges and names."""
    while signature and (start := re.search(r"~?(typing\.|types\.)?Annotated\[", signature)):
        depth, comma, end = 0, None, start.end()
        while depth >= 0:
            depth += {"[": 1, "(": 1, "]": -1, ")": -1}.get(signature[end], 0)
            comma = end if comma is None and depth == 0 and signature[end] == "," else comma
            end += 1
        kind = signature[start.end() : comma]
        signature = signature[: start.start()] + kind + signature[end:]
    return signature, returned


def help_of(*words):
    """Returns what `dpsgd WORDS --help` prints."""
    text = cli.help_of([*words, "--help"]) or ""
    return "\n".join(line.rstrip() for line in text.splitlines())


def section(name):
    """Returns Markdown of what a command says of itself."""
    return f"\n## dpsgd {name}\n\n```text\n{help_of(*name.split())}\n```\n"


def add_help(app, page, content):
    """Fills the page of the command."""
    if page == COMMAND:
        os.environ["COLUMNS"] = "80"
        content[0] += "".join(section(name) for name in cli.COMMANDS)


def setup(app):
    """Connects the functions above, and has the page of the command read anew each time."""
    app.connect("autodoc-process-docstring", as_rst)
    app.connect("autodoc-process-signature", without_ranges)
    app.connect("source-read", add_help)
    app.connect("env-get-outdated", lambda *_: [COMMAND])
