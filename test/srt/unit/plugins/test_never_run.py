"""The page's list of paths that are on by default on CUDA and that no GPU has run."""

import pkgutil
import re
import subprocess

import pytest
from serving import ROOT

from sglang_dflash.srt.arg_groups import options

RUN = "3fc71ba"  # the commit of the only run on a GPU
TITLE = "### On by default on CUDA, and never run there"
_, _, SECTION = (ROOT / "docs" / "compatibility.md").read_text().partition(TITLE)
ROWS = re.findall(r"^- ([^`]+): `([^`]+)`, `([^`]+)`(.*)$", SECTION.split("\n### ")[0], re.M)
OFF = ", off in basic mode"


def git(*arguments: str) -> int:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=False).returncode


@pytest.mark.parametrize(("path", "where", "commit", "basic"), ROWS, ids=[row[1] for row in ROWS])
def test_a_row(path, where, commit, basic):
    """Its code is there, and younger than the run."""
    pkgutil.resolve_name(f"sglang_dflash.srt.{where}")
    assert basic in (OFF, "")
    if git("cat-file", "-e", f"{RUN}^{{commit}}") != 0:
        pytest.skip("without the history of git")
    assert (
        git("merge-base", "--is-ancestor", RUN, commit)
        == 0
        != git("merge-base", "--is-ancestor", commit, RUN)
    )


def test_basic_mode_takes_away_what_the_page_says():
    off = {path.partition(",")[0] for path, _, _, basic in ROWS if basic == OFF}
    by_flag = {"adaptive verify lengths"}  # off by default on CUDA
    assert off == set(options._OFF_IN_BASIC_MODE) - by_flag
