"""ROOFLINE.md shows what `benchmark/roofline.py` computes."""

import roofline
from serving import ROOT


def test_roofline_page_shows_what_the_program_computes():
    page = (ROOT / "benchmark" / "ROOFLINE.md").read_text()
    for title, table in roofline.tables().items():
        assert f"## {title}\n" in page
        assert table in page, f"{title} is out of date: run python benchmark/roofline.py"
