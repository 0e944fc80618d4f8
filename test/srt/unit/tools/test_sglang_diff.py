"""`python tools/sglang_diff`: our patches compared with an SGLang that is not imported."""

import ast
import functools
import importlib.util
import json
import re
from pathlib import Path

import pytest
from serving import ROOT
from sglang_diff import __main__ as command
from sglang_diff import compare, source_tree
from sglang_diff.source_tree import SourceTree, fingerprint

UTILS = "sglang/srt/speculative/dflash_utils.py"
CHECK = "sglang.srt.managers.scheduler.validate_dflash_request"


@pytest.fixture(scope="module", autouse=True)
def parsed_once():
    """Parse a text once for all tests: the copies differ in one file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source_tree, "parse_module", functools.cache(source_tree.parse_module))
        yield


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    """Texts of all files of the installed SGLang that matter, by path."""
    tree = SourceTree.installed()
    compare.compare(tree, compare.baseline_for(tree.version))
    folder = Path(importlib.util.find_spec("sglang").origin).parents[1]
    # A module that only passes a name on is looked for too.
    packages = {parent for file in tree.files for parent in Path(file).parents if parent.name}
    inits = {str(package / "__init__.py") for package in packages}
    found = {file: folder / file for file in tree.files | inits}
    return {file: path.read_text() for file, path in found.items() if path.is_file()}


@pytest.fixture
def copy(files, tmp_path):
    """Return a function that writes a copy of SGLang with an edit, and returns its folder."""

    def write(file: str, old: str, new: str) -> Path:
        assert old in files[file], f"{file} has no {old!r}: choose another edit"
        folder = tmp_path / "site-packages"
        for name, text in {**files, file: files[file].replace(old, new, 1)}.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        (folder / f"sglang-{SourceTree.installed().version}.dist-info").mkdir()
        return folder

    return write


def run(*arguments: object) -> int:
    return command.main([str(argument) for argument in arguments])


def told(output: str) -> list[str]:
    """List the rows of a report's table."""
    return [line for line in output.splitlines() if line.startswith("| `")]


def test_the_installed_sglang_is_as_recorded(capsys):
    assert run() == 0
    output = capsys.readouterr().out
    assert not told(output) and "Nothing required is gone." in output


GRAPHS = "sglang/srt/model_executor/runner/decode_cuda_graph_runner.py"
RESULT = "sglang/srt/managers/utils.py"
HEAD = "def validate_dflash_request("
CONDITION = "if enable_overlap and req.return_hidden_states:"
# A change -> the edit, words of the row that names it, and the exit status.
PLANTED = {
    "a body": (
        (UTILS, CONDITION, "if req.return_hidden_states:"),
        f"{CHECK}` | changed | DFLASH | {UTILS}:",
        0,
    ),
    "a target renamed": ((UTILS, HEAD, "def check_request("), f"{CHECK}` | gone", 1),
    "an argument added": ((UTILS, HEAD, f"{HEAD}rank, "), f"{CHECK}` | parameters: takes (rank, ", 1),
    "a method of the ledger renamed": (
        (GRAPHS, "def _stage_ragged_verify_layout(", "def _stage_layout("),
        "_stage_ragged_verify_layout` | gone: cycle/ragged_graphs.py has to override it",
        0,
    ),
    "a field of the ledger renamed": (
        (RESULT, "    new_seq_lens: ", "    later_seq_lens: "),
        "GenerationBatchResult.new_seq_lens` | gone: dflash_worker.py has to write it",
        1,
    ),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_change_is_named(planted, copy, capsys):
    edit, words, status = PLANTED[planted]
    assert run("--against", copy(*edit)) == status
    output = capsys.readouterr().out
    [line] = told(output)
    assert words in line and ("Required and gone: " in output) == (status == 1)


def test_a_version_is_recorded(tmp_path):
    file = tmp_path / "fingerprints.json"
    assert run("--record", file) == 0
    [(version, recorded)] = json.loads(file.read_text()).items()
    assert version == SourceTree.installed().version and recorded == compare.records()[version]


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


def test_what_a_fingerprint_covers():
    def of(text: str) -> str:
        return fingerprint(ast.parse(text).body[0])

    plain = of("def f(a, b=1):\n    return a + b\n")
    assert plain == of(
        'def f(a: int, b: int = 1) -> int:\n    """Add."""\n    # a comment\n    return (a +\n b)\n'
    )
    others = ["a + b + 0", "a - b", "b + a", "None"]
    prints = {of(f"def f(a, b=1):\n    return {text}\n") for text in others}
    prints |= {of("def f(a, b=2):\n    return a + b\n"), of("@once\ndef f(a, b=1):\n    return a + b\n")}
    assert plain not in prints and len(prints) == 6
