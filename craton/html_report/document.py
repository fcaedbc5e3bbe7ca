"""The whole of a page: no network, no server, no fonts.

A content security policy forbids the page to load or send anything; whatever is not `Markup` is escaped. plotly and the
figures are in the file; what they show must stand in the body too, so that the page is whole without JavaScript.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from importlib.resources import files

from craton.html_report.markup import markup
from craton.html_report.plots import Figure

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def page_html(title: str, body: str, figures: Mapping[str, Figure], footer: str, style: str) -> str:
    """A figure is drawn into the element of the body whose id is its name; `style` adds to the common style sheet, such
    as the colours that figures name."""
    from plotly.offline import get_plotlyjs  # large, and only the page needs it

    package = files("craton.html_report")
    # "<" cannot end the script element when it is written as an escape of JSON.
    data = json.dumps(figures, allow_nan=False, ensure_ascii=False).replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{escape(title)}</title>
<style>{package.joinpath("page.css").read_text(encoding="utf-8")}{style}</style>
</head>
<body>
<main>
{markup(body)}
<footer>{markup(footer)}</footer>
</main>
<script type="application/json" id="figures">{data}</script>
<script>{get_plotlyjs()}</script>
<script>{package.joinpath("page.js").read_text(encoding="utf-8")}</script>
</body>
</html>
"""
