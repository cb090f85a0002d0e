"""Pages from templates: Markdown, and one HTML file with its style and its pictures inside."""

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
"""How the sentence of a run begins that has none (`Guarantee.sentence`)."""

NARROW = 3
"""Most columns of a table that stays one on a phone; a row of a wider one becomes a block there."""


@dataclass(frozen=True)
class Page:
    """Markdown whose images are among `figures`, each an SVG, by file name."""

    title: str
    markdown: str
    figures: dict[str, bytes] = field(default_factory=dict)


@functools.cache
def templates() -> jinja2.Environment:
    """Returns the templates of pages: of Markdown, whose text is escaped by name, and of HTML."""
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=lambda name: name is not None and ".html" in name,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {"escape": report.escape, "sentence": lambda text: text[:1].upper() + text[1:]}
    found.globals |= {"table": report.table, "bullets": report.bullets}
    found.globals |= {"views": views, "listings": listings}
    return found


def render(template: str, **context: Any) -> str:
    """Returns a page, or a part of one, of Markdown."""
    text = templates().get_template(template).render(**context)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


class _Renderer(RendererHTML):
    """Pictures inside the page, with their captions; wide tables scroll by themselves."""

    def image(self, tokens: Sequence[Token], idx: int, options: Any, env: Any) -> str:
        """Returns the picture of a token as a figure; one that the page has not stays text."""
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
        """Returns the beginning of a guarantee, or of its absence."""
        void = any(VOID in token.content for token in tokens[idx : idx + 3])
        return '<blockquote class="void">\n' if void else "<blockquote>\n"

    def table_open(self, tokens: Sequence[Token], idx: int, options: Any, env: Any) -> str:
        """Returns the beginning of a table, whose cells are told what their columns are called."""
        found = tokens[idx:]
        end = next(i for i, token in enumerate(found) if token.type == "table_close")
        names = [found[i + 1].content for i in range(end) if found[i].type == "th_open"]
        cells = [token for token in found[:end] if token.type == "td_open"]
        for number, cell in enumerate(cells):
            cell.attrSet("data-label", names[number % len(names)])
        wide = ' class="wide"' if len(names) > NARROW else ""
        return f'<div class="table"><table{wide}>\n'

    def table_close(self, tokens: Sequence[Token], idx: int, options: Any, env: Any) -> str:
        """Returns the end of a table."""
        return "</table></div>\n"


def document(page: Page) -> str:
    """Returns the page as one HTML document; text is escaped, raw HTML in it stays text."""
    markdown = MarkdownIt("commonmark", {"html": False}, renderer_cls=_Renderer).enable("table")
    body = markdown.render(page.markdown, {"figures": page.figures})
    # A figure is a block of its own, which HTML does not allow inside a paragraph.
    body = body.replace("<p><figure>", "<figure>").replace("</figure></p>", "</figure>")
    return templates().get_template("page.html.jinja").render(title=page.title, body=body)
