"""Settings of the site that scripts/docs builds; Sphinx's manual explains each."""

import contextlib
import importlib
import io
import os
import re

from sphinx.ext.napoleon import Config, GoogleDocstring

from experiments import cli
from samplers.settings import SETTINGS

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


def help_of(*words):
    """Returns what `dpsgd WORDS --help` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        cli.main([*words, "--help"])
    return "\n".join(line.rstrip() for line in printed.getvalue().splitlines())


def section(*words):
    """Returns Markdown of what a command says of itself, and its subcommands after it."""
    text = help_of(*words)
    found = f"\n{'#' * (len(words) + 1)} dpsgd {' '.join(words)}\n\n```text\n{text}\n```\n"
    module = importlib.import_module(f"experiments.cli.commands.{words[0]}")
    below = list(getattr(module, "TOPICS", ())) if len(words) == 1 else []
    below += re.findall(r"^[│ ]+• ([\w-]+)(?= |$)", text, re.MULTILINE)
    return found + "".join(section(*words, word) for word in below)


def samplers():
    """Returns Markdown of the options that each sampler adds to those of a command."""
    option = re.compile(r"^  (--[\w-]+).*(?:\n {8,}.*)*", re.MULTILINE)
    common = {found[1] for found in option.finditer(help_of("epsilon"))}
    lines = ["\n## Samplers\n\nEach adds its settings where a command says `sampler:NAME`."]
    for name in SETTINGS:
        found = option.finditer(help_of("epsilon", f"sampler:{name}"))
        own = "\n".join(each[0] for each in found if each[1] not in common)
        lines.append(f"### sampler:{name}\n\n```text\n{own}\n```\n")
    return "\n\n".join(lines)


def add_help(app, page, content):
    """Fills the page of the command."""
    if page == COMMAND:
        os.environ["COLUMNS"] = "80"
        content[0] += "".join(section(name) for name in cli.COMMANDS) + samplers()


def setup(app):
    """Connects the functions above, and has the page of the command read anew each time."""
    app.connect("autodoc-process-docstring", as_rst)
    app.connect("source-read", add_help)
    app.connect("env-get-outdated", lambda *_: [COMMAND])
