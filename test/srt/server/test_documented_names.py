"""What pages name is there: flags and files. test_documented_commands.py runs their commands."""

import argparse
import importlib.metadata
import inspect
import json
import re
import subprocess
from pathlib import Path

import pytest
import sglang
from serving import ROOT
from sglang.srt.managers import io_struct
from sglang.srt.server_args import ServerArgs
from support.documented import PAGES, blocks, commands, defined_flags, spans

from sglang_dflash.srt.arg_groups.options import add_cli_args

# limits.md is written from the code, and lists what is refused or ignored.
USER_PAGES = [
    page
    for page in (*PAGES, ROOT / "SECURITY.md")
    if page.name not in ("CHANGELOG.md", "limits.md") and page.parent.name != "dev"
]
ALL_PAGES = [*USER_PAGES, *PAGES, *sorted((ROOT / "docs").rglob("*.md")), ROOT / "CONTRIBUTING.md"]

OTHER_PROGRAMS = {
    "--speculative-config": "vLLM's",
    "--disable-ignore-eos": "sglang.benchmark.serving's",
    "--per-chunk-usage": "aiperf's",
    **dict.fromkeys(("--draft-vocab-size", "--from-pretrained", "--num-layers"), "the speculators library's"),
    **dict.fromkeys(("--sliding-window", "--full-attention-indices"), "the speculators library's"),
    "--num-depths": "the speculators library's",
    "--sglang-": "slime's",
    "--sglang-speculative-algorithm": "slime's",
    "--update-weight-transport": "slime's",
}


def server_flags() -> set[str]:
    """Return the flags of SGLang's servers, with ours."""
    parser = argparse.ArgumentParser()
    add_cli_args(inspect.unwrap(ServerArgs.add_cli_args), parser)
    return {flag for action in parser._actions for flag in action.option_strings}


def flags_of(page: Path) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]+", page.read_text()))


def test_flags_of_other_programs_are_theirs():
    """A flag that is no server's is that of a documented command or of a script of ours."""
    scripts = [
        *(ROOT / "python").rglob("*.py"),
        *(ROOT / "benchmark").glob("*.py"),
        *(ROOT / "examples").rglob("*.py"),
        *(ROOT / "tools").rglob("*.py"),
    ]
    theirs = {flag for command in commands() for flag in command.flags}.union(*map(defined_flags, scripts))
    unknown = set().union(*map(flags_of, USER_PAGES)) - server_flags() - theirs - set(OTHER_PROGRAMS)
    assert not unknown, sorted(unknown)


def anchors(page: Path) -> set[str]:
    """Return the names by which links reach the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in re.findall(r"^#+ (.*)$", text, re.M)]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_files_in_the_text_exist():
    """Files in backticks are ours or SGLang's, from any folder on; links lead to files and headings."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    ours = {Path(name) for name in listed.split()}
    if not ours:
        pytest.skip("not a checkout of git")
    ours |= {folder for name in ours for folder in name.parents}
    package = Path(sglang.__file__).parent
    known = {f"/{name}" for name in ours} | {
        f"/{path.relative_to(package)}" for path in package.rglob("*.py")
    }
    ends = {end for name in known for end in _ends(name)}
    missing = []
    for page in dict.fromkeys(ALL_PAGES):
        for span in spans(page):
            is_file = re.fullmatch(r"\w[\w./-]*(\.(py|md|json|jsonl|toml|sh|yml)|/)", span)
            if is_file and span.rstrip("/") not in ends and span != "cpu/sitecustomize.py":  # a user's own
                missing.append(f"{page.relative_to(ROOT)}: `{span}`")
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            name, _, anchor = target.partition("#")
            other = page.parent / name if name else page
            if "://" in target or (other.exists() and (not anchor or anchor in anchors(other))):
                continue
            missing.append(f"{page.relative_to(ROOT)}: ({target})")
    assert not missing, "\n".join(missing)


def _ends(name: str) -> list[str]:
    """Return a path from each of its folders on."""
    parts = name.strip("/").split("/")
    return ["/".join(parts[start:]) for start in range(len(parts))]


def test_request_bodies_have_fields_that_sglang_reads():
    """Lines of a page such as `/pause_generation {"mode": "in_place"}`."""
    named = {name.lower(): kind for name, kind in vars(io_struct).items() if name.endswith("ReqInput")}
    named["updateweightsfromdiskreqinput"] = io_struct.UpdateWeightFromDiskReqInput
    checked = set()
    for page in USER_PAGES:
        for language, text in blocks(page):
            bodies = (
                re.findall(r"^(/\w+)\s+(\{.*?\})$", text, re.MULTILINE | re.DOTALL)
                if language == "text"
                else []
            )
            for endpoint, body in bodies:
                kind = named[endpoint.strip("/").replace("_", "") + "reqinput"]
                unknown = json.loads(body).keys() - set(kind.__struct_fields__)
                assert not unknown, f"{page.name}: {endpoint}: {unknown}"
                checked.add(endpoint)
    assert len(checked) > 8


def test_the_table_of_versions_is_what_sglang_requires():
    page = (ROOT / "docs" / "versions.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line[:1] == "|"]
    by_release = {row[1]: row for row in rows}
    metadata = importlib.metadata.metadata("sglang")
    required = dict(
        re.findall(r"^([\w-]+)[^=;\n]*==([\w.]+)$", "\n".join(metadata.get_all("Requires-Dist")), re.M)
    )
    _, _, torch, cuda, _, flashinfer, python = by_release[metadata["Version"]]
    assert (torch, flashinfer) == (required["torch"], required["flashinfer_python"])
    assert f"cuda-python>={cuda}" in metadata.get_all("Requires-Dist")
    assert metadata["Requires-Python"] == f">={python.split()[0]}"
