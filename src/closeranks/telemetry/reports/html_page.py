"""Writes ``report.html``: the report with its pictures in one file that can be mailed or attached.

Invariants: the page loads nothing from anywhere, and runs no script; text from a run is shown, never interpreted.
"""

from __future__ import annotations

import base64
import re
from contextlib import suppress
from pathlib import Path

from closeranks.telemetry.run_log.run_folder import RunFolder

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2933; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h1, h2 { line-height: 1.2 } h2 { margin-top: 2rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { border-bottom: 1px solid #e6eaef; padding: .25rem .8rem .25rem 0; text-align: left; vertical-align: top }
pre { background: #f5f7fa; padding: .8rem; overflow-x: auto } code { font-size: 90% } img { max-width: 100% }
"""
_IMAGE = re.compile(r'<img src="([^"/]+\.png)"')


def write_html(folder: Path) -> Path:
    """Render the report of a run folder, which must exist."""
    run = RunFolder(folder)
    text = _page(folder, run.report.read_text(encoding="utf-8"))
    unfinished = run.html.with_name(".report.html")
    try:
        unfinished.write_text(text, encoding="utf-8")
        return unfinished.replace(run.html)
    except OSError:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


def _page(folder: Path, markdown: str) -> str:
    from markdown_it import MarkdownIt  # takes a good part of a tenth of a second

    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(markdown)
    title = re.sub(r"[<>&]", "", markdown.partition("\n")[0].removeprefix("# "))
    head = f'<meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    return f"<!doctype html>\n<html lang=en><head>{head}</head><body>\n{_embed(folder, body)}</body></html>\n"


def _embed(folder: Path, body: str) -> str:
    """Pictures of the run folder become part of the page; one that is missing stays a link."""

    def replaced(found: re.Match[str]) -> str:
        try:
            content = base64.b64encode((folder / found[1]).read_bytes()).decode()
        except OSError:
            return found[0]
        return f'<img src="data:image/png;base64,{content}"'

    return _IMAGE.sub(replaced, body)
