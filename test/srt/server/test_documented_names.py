"""What pages name is there: flags and files. test_documented_commands.py runs their commands."""

import argparse
import inspect
import re
import subprocess
from pathlib import Path

import pytest
import sglang
from serving import ROOT
from sglang.srt.server_args import ServerArgs
from support.documented import PAGES, commands, defined_flags, spans

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
    "--draft-vocab-size": "the speculators library's",
    "--from-pretrained": "the speculators library's",
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


def test_files_in_the_text_exist():
    """Files in backticks are ours or SGLang's, from any folder on; the targets of links are there."""
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
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            if "://" not in target and not (page.parent / target).exists():
                missing.append(f"{page.relative_to(ROOT)}: ({target})")
    assert not missing, "\n".join(missing)


def _ends(name: str) -> list[str]:
    """Return a path from each of its folders on."""
    parts = name.strip("/").split("/")
    return ["/".join(parts[start:]) for start in range(len(parts))]
