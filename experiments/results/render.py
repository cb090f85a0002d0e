"""Pages from templates: Markdown, and one HTML file with its style and pictures."""

from __future__ import annotations

import base64
import functools
import html
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token

from dpsgd.runs import report
from experiments.results import listings, views

VOID = "NO GUARANTEE"
"""Beginning of the sentence of a run without a guarantee (`Guarantee.sentence`)."""

NARROW = 3
"""Most columns of a table that fits a phone; rows of a wider table become blocks there."""


@dataclass(frozen=True)
class Page:
    """Markdown and its images, SVG by file name."""

    title: str
    markdown: str
    figures: dict[str, bytes] = field(default_factory=dict)


@functools.cache
def templates() -> jinja2.Environment:
    """Returns the templates of pages: Markdown and escaped HTML."""
    pages = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=lambda name: name is not None and ".html" in name,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.filters |= {"escape": report.escape, "sentence": lambda text: text[:1].upper() + text[1:]}
    pages.globals |= {"table": report.table, "bullets": report.bullets}
    pages.globals |= {"views": views, "listings": listings}
    return pages


def render(template: str, **context: Any) -> str:
    """Renders a template to Markdown.

    Args:
      template: File name in the folder `templates`.
      **context: Values of the template's variables.
    """
    text = templates().get_template(template).render(**context)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


class _Renderer(RendererHTML):
    """Renderer with pictures inside the page, captions, and tables that scroll alone."""

    def image(self, tokens: Sequence[Token], idx: int, options: Any, env: Any) -> str:
        """Returns a picture as a figure; unknown ones as text."""
        token = tokens[idx]
        name = str(token.attrs["src"])
        if name not in env["figures"]:
            return html.escape(f"![{token.content}]({name})")
        data = base64.b64encode(env["figures"][name]).decode()
        caption = html.escape(token.content)
        return (
            f'<figure><img alt="{caption}" src="data:image/svg+xml;base64,{data}">'
            f"<figcaption>{caption}</figcaption></figure>"
        )

    def blockquote_open(self, tokens: Sequence[Token], idx: int, options: Any, env: Any) -> str:
        """Returns a guarantee's opening tag, marked if void."""
        void = any(VOID in token.content for token in tokens[idx : idx + 3])
        return '<blockquote class="void">\n' if void else "<blockquote>\n"

    def table_open(self, tokens: Sequence[Token], idx: int, options: Any, env: Any) -> str:
        """Returns a table's opening tag; labels its cells."""
        following = tokens[idx:]
        stop = next(i for i, token in enumerate(following) if token.type == "table_close")
        names = [following[i + 1].content for i in range(stop) if following[i].type == "th_open"]
        cells = [token for token in following[:stop] if token.type == "td_open"]
        for number, cell in enumerate(cells):
            cell.attrSet("data-label", names[number % len(names)])
        wide = ' class="wide"' if len(names) > NARROW else ""
        return f'<div class="table"><table{wide}>\n'

    def table_close(self, tokens: Sequence[Token], idx: int, options: Any, env: Any) -> str:
        """Returns the closing tag of a table."""
        return "</table></div>\n"


def document(page: Page) -> str:
    """Renders a page to one HTML document, escaping all text."""
    markdown = MarkdownIt("commonmark", {"html": False}, renderer_cls=_Renderer).enable("table")
    body = markdown.render(page.markdown, {"figures": page.figures})
    # A figure is a block of its own, which HTML does not allow inside a paragraph.
    body = body.replace("<p><figure>", "<figure>").replace("</figure></p>", "</figure>")
    return templates().get_template("page.html.jinja").render(title=page.title, body=body)
