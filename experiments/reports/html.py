"""A page of Markdown as one HTML file that needs nothing else: styles and pictures are inside."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token

from experiments.reports.overview import Page

VOID = "NO GUARANTEE"
"""How the sentence of a run begins that has none (`dpsgd.Guarantee.sentence`)."""

_STYLE = """
:root { --ink: #1c2330; --faint: #5b6575; --line: #e3e7ee; --wash: #f6f8fb; --accent: #00684f; }
* { box-sizing: border-box; }
body { margin: 0; background: #fff; color: var(--ink);
  font: 16px/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 3rem 1.5rem 5rem; }
h1 { font-size: 2rem; line-height: 1.2; letter-spacing: -0.02em; margin: 0 0 2rem;
  padding-bottom: 1.25rem; border-bottom: 3px solid var(--accent); }
h2 { font-size: 1.35rem; letter-spacing: -0.01em; margin: 3rem 0 1rem; }
h3 { font-size: 1.05rem; margin: 2rem 0 0.5rem; }
p, li { max-width: 46rem; }
ul { padding-left: 1.2rem; }
li { margin: 0.25rem 0; }
blockquote { margin: 0.75rem 0; padding: 0.75rem 1.1rem; background: #eef7f4;
  border-left: 4px solid var(--accent); border-radius: 0 6px 6px 0; }
blockquote p { margin: 0; max-width: none; }
blockquote.void { background: #fdf1ef; border-color: #b3261e; }
.table { overflow-x: auto; margin: 1rem 0 1.5rem; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.45rem 0.9rem 0.45rem 0; text-align: left; vertical-align: top; }
th { color: var(--faint); font-weight: 600; border-bottom: 2px solid var(--line); }
td { border-bottom: 1px solid var(--line); }
td[style*="right"] { white-space: nowrap; }
thead:not(:has(th:not(:empty))) { display: none; }
figure { margin: 1.5rem 0; }
figure img { max-width: 100%; height: auto; }
figcaption { color: var(--faint); font-size: 0.88rem; max-width: 46rem; }
pre { background: var(--wash); border: 1px solid var(--line); border-radius: 6px;
  padding: 0.9rem 1.1rem; overflow-x: auto; font-size: 0.85rem; line-height: 1.5; }
code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
:not(pre) > code { background: var(--wash); padding: 0.1em 0.3em; border-radius: 4px; }
@media (max-width: 40rem) {
  main { padding: 1.5rem 1rem 3rem; }
  table { font-size: 0.8rem; }
  th, td { padding-right: 0.6rem; }
}
@media print { main { padding: 0; } h2 { break-after: avoid; } figure, tr { break-inside: avoid; } }
"""


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
        """Returns the beginning of a table."""
        return '<div class="table"><table>\n'

    def table_close(self, tokens: Sequence[Token], idx: int, options: Any, env: Any) -> str:
        """Returns the end of a table."""
        return "</table></div>\n"


def document(page: Page) -> str:
    """Returns the page as one HTML document; text is escaped, raw HTML in it stays text."""
    markdown = MarkdownIt("commonmark", {"html": False}, renderer_cls=_Renderer).enable("table")
    body = markdown.render(page.markdown, {"figures": page.figures})
    # A figure is a block of its own, which HTML does not allow inside a paragraph.
    body = body.replace("<p><figure>", "<figure>").replace("</figure></p>", "</figure>")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(page.title)}</title>
<style>{_STYLE}</style>
</head>
<body><main>
{body}</main></body>
</html>
"""
