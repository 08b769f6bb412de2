"""Tables of HTML, as notebooks show values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def table(title: str, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table below a line. Whole numbers have commas, others four digits."""
    lines = [f"<tr>{''.join(f'<th>{escape(head)}</th>' for head in heads)}</tr>"] if heads else []
    lines += [f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows]
    return f"<p><b>{escape(title)}</b></p><table>{''.join(lines)}</table>"


def _cell(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f'<td style="text-align:left">{escape(str(value))}</td>'
    return f"<td>{value:,}</td>" if isinstance(value, int) else f"<td>{value:,.4g}</td>"
