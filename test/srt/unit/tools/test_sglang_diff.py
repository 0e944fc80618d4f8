"""`python tools/sglang_diff`: our patches compared with an SGLang that is not imported."""

import functools
import re

import pytest
from serving import ROOT
from sglang_diff import __main__ as command
from sglang_diff import compare, source_tree
from sglang_diff.source_tree import SourceTree

CHECK = "sglang.srt.managers.scheduler.validate_dflash_request"
parse = functools.cache(source_tree.parse_module)


@pytest.fixture(autouse=True)
def parsed_once(monkeypatch):
    """Parse a text once for all tests: what they compare differs in one file."""
    monkeypatch.setattr(source_tree, "parse_module", parse)


def run(*arguments: object) -> int:
    return command.main([str(argument) for argument in arguments])


def told(output: str) -> list[str]:
    """List the rows of a report's table."""
    return [line for line in output.splitlines() if line.startswith("| `")]


def test_the_installed_sglang_is_as_recorded(capsys):
    assert compare.is_as_recorded(SourceTree.installed())
    assert run() == 0
    output = capsys.readouterr().out
    assert not told(output) and "Nothing required is gone." in output


HEAD = b"def validate_dflash_request("
# text, edited text, words of the one row that is told, exit status
PLANTED = {
    "a body": (
        b"if enable_overlap and req.return_hidden_states:",
        b"if req.return_hidden_states:",
        "sglang/srt/speculative/dflash_utils.py:",
        0,
    ),
    "a target renamed": (HEAD, b"def check_request(", "gone", 1),
    "an argument added": (HEAD, HEAD + b"rank, ", "rank", 1),
    "a method of the ledger renamed": (
        b"def _stage_ragged_verify_layout(",
        b"def _stage_layout(",
        "_stage_ragged_verify_layout` | gone: cycle/ragged_graphs.py has to override it",
        0,
    ),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_change_is_named(planted, monkeypatch, capsys):
    old, new, words, status = PLANTED[planted]
    monkeypatch.setattr(source_tree, "parse_module", lambda content: parse(content.replace(old, new)))
    assert run() == status
    output = capsys.readouterr().out
    [line] = told(output)
    assert words in line
    assert (f"Required and gone: {CHECK}" in output) == (status == 1)


PAGE = ROOT / "docs" / "dev" / "updating-sglang.md"


def names_in(rows: list[str]) -> set[str]:
    """Return the last parts of the names in the rows' first cells."""
    cells = (row.split("|")[1] for row in rows)
    return {re.split(r"[.:]", name)[-1] for cell in cells for name in re.findall("`([^`]+)`", cell)}


def test_the_page_has_a_verdict_on_each_difference(capsys):
    installed, (*_, before, newest) = SourceTree.installed(), compare.supported_versions()
    if installed.version != newest:
        pytest.skip(f"the table is of SGLang {newest}")
    assert run("--since", before) == 0
    section = PAGE.read_text().partition(f"## {before} to {newest}")[2]
    assert names_in(told(section)) == names_in(told(capsys.readouterr().out)), (
        f"say in {PAGE.name} what became of each name that `python tools/sglang_diff --since {before}` prints"
    )
