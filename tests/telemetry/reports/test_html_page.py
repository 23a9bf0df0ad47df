"""The report as one page of HTML: complete in itself, and nothing from a run is interpreted."""

from __future__ import annotations

from pathlib import Path

import pytest

from closeranks.telemetry.reports.html_page import write_html

REPORT = """# a <b>run</b>

![curve](curve.png)

![gone](gone.png)

| phase | share |
|---|---|
| forward | 30% |

<script>alert(1)</script>
"""


def test_pictures_are_inside_and_markup_of_a_run_is_text(tmp_path: Path) -> None:
    (tmp_path / "report.md").write_text(REPORT)
    (tmp_path / "curve.png").write_bytes(b"\x89PNG")
    page = write_html(tmp_path)
    text = page.read_text()
    assert page.name == "report.html"
    assert 'src="data:image/png;base64,iVBORw=="' in text
    assert 'src="gone.png"' in text
    assert "<td>forward</td>" in text
    assert "<script>" not in text
    assert "<b>" not in text
    assert "http" not in text


def test_a_report_that_is_missing_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_html(tmp_path)
    assert not list(tmp_path.iterdir())
