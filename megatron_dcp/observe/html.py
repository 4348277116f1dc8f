"""One self-contained HTML page: text, tables and plotly figures, no network.

The plotly library is written into the page once; figures follow as JSON. All text is escaped.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; margin: 0 auto; max-width: 1120px;
       padding: 24px; }
h1 { font-size: 26px; margin-bottom: 4px; }
h2 { font-size: 19px; margin: 36px 0 8px; border-bottom: 1px solid #ddd; padding-bottom: 4px; }
p.lead { color: #555; margin-top: 0; }
table { border-collapse: collapse; margin: 12px 0; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 12px; border-bottom: 1px solid #e4e4e4; text-align: right; }
th { background: #f5f5f5; font-weight: 600; }
th:first-child, td:first-child { text-align: left; }
.figure { margin: 12px 0; }
.wide { overflow-x: auto; }
.note { background: #fff8e1; border-left: 4px solid #ccbb44; padding: 8px 14px; margin: 12px 0; }
code { background: #f5f5f5; padding: 1px 4px; }
"""


class Page:
    """Collects sections and writes them. Figures are plotly figures."""

    def __init__(self, title: str, lead: str) -> None:
        self.title = title
        self._parts = [f"<h1>{html.escape(title)}</h1>\n<p class=lead>{html.escape(lead)}</p>"]
        self._figures = 0

    def section(self, title: str, text: str = "") -> None:
        self._parts.append(f"<h2>{html.escape(title)}</h2>")
        if text:
            self.text(text)

    def text(self, text: str) -> None:
        self._parts.append(f"<p>{html.escape(text)}</p>")

    def note(self, text: str) -> None:
        self._parts.append(f"<div class=note>{html.escape(text)}</div>")

    def table(self, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        cells = "".join(f"<th>{html.escape(str(h))}</th>" for h in head)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(str(c))}</td>" for c in row) + "</tr>"
            for row in rows
        )
        self._parts.append(
            f"<div class=wide><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"
            "</div>"
        )

    def facts(self, facts: Mapping[str, Any]) -> None:
        self.table(("", "value"), list(facts.items()))

    def figure(self, figure: Any) -> None:
        self._figures += 1
        body = figure.to_html(
            full_html=False, include_plotlyjs=False, div_id=f"figure-{self._figures}",
            config={"displaylogo": False, "responsive": True},
        )  # fmt: skip
        self._parts.append(f"<div class=figure>{body}</div>")

    def write(self, path: Path) -> Path:
        """Write the page in one move."""
        from plotly.offline import get_plotlyjs

        path.parent.mkdir(parents=True, exist_ok=True)
        text = (
            "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
            f"<title>{html.escape(self.title)}</title><style>{_STYLE}</style>"
            f"<script>{get_plotlyjs()}</script></head>\n<body>\n"
            + "\n".join(self._parts)
            + "\n</body></html>\n"
        )
        part = path.with_suffix(".part")
        part.write_text(text, encoding="utf-8")
        part.replace(path)
        return path
