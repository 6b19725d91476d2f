"""HTML from text that nobody vouches for: whatever is not written here is escaped."""

import base64
import html
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from momentum2.errors import shown


def escape(text: object) -> str:
    """Text as HTML shows it, in and between tags; control characters are spelled out."""
    lines = str(text).split("\n")
    return html.escape("\n".join(shown(line, len(line)) for line in lines), quote=True)


def script_json(value: Any) -> str:
    """JSON that cannot end the `<script>` it stands in."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def data_uri(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def number(value: object, digits: int = 4) -> str:
    """A number for people; whole ones in full, and – for what is missing or no number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "–" if value is None else str(value)
    if not math.isfinite(value):
        return "no number" if math.isnan(value) else "infinite"
    return f"{value:,}" if isinstance(value, int) else f"{value:.{digits}g}"


def duration(seconds: float) -> str:
    """3725 as `1 h 2 min`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours:,} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def table(header: Sequence[object], rows: Iterable[Sequence[object]], caption: str = "") -> str:
    """A table of text whose first column names the rows; on a narrow screen it scrolls by itself."""
    columns = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    lines = []
    for first, *cells in rows:
        tail = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        lines.append(f'<tr><th scope="row">{escape(first)}</th>{tail}</tr>')
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    head = f"<thead><tr>{columns}</tr></thead>" if columns else ""
    label = escape(caption or "table")
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table>{title}{head}'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def note(sentence: str) -> str:
    """One line about something that is not there."""
    return f'<p class="note">{escape(sentence)}</p>'
