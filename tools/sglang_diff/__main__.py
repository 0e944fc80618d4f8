"""Compare our patches of SGLang with any version of it, without importing that version.

    python tools/sglang_diff [--against WHEEL | FOLDER | VERSION | latest] [--since VERSION]
                             [--diff TARGET] [--record FILE]

Without `--against` the installed SGLang is read. Exit status: 0 nothing required is gone, 1 something is, 2
the SGLang to compare with cannot be read.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from difflib import unified_diff
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from sglang_dflash.srt.patching import Patch  # noqa: E402
from sglang_diff import compare  # noqa: E402
from sglang_diff.compare import SAME, Row  # noqa: E402
from sglang_diff.reaches import Reach  # noqa: E402
from sglang_diff.source_tree import NotSGLang, SourceTree  # noqa: E402

_DOWNLOAD_SECONDS = 300


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    args = _parse(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="sglang-dflash-") as folder:
            return _run(args, Path(folder))
    except NotSGLang as error:
        print(f"sglang_diff: {error}", file=sys.stderr)
        return 2


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python tools/sglang_diff", description="Do our patches of SGLang fit a version of it?"
    )
    add = parser.add_argument
    add("--against", metavar="SGLANG", help="a wheel, a folder, a version or `latest` (default: installed)")
    add("--since", metavar="VERSION", help="the supported version to compare with (default: the nearest)")
    add("--diff", metavar="TARGET", help="show how a function or class differs from --since's, and stop")
    add("--record", type=Path, metavar="FILE", help="add this version's fingerprints to a JSON file")
    args = parser.parse_args(arguments)
    supported = compare.supported_versions()
    if args.since is not None and args.since not in supported and args.diff is None:
        parser.error(f"--since {args.since}: recorded versions are {', '.join(supported)}")
    return args


def _run(args: argparse.Namespace, folder: Path) -> int:
    tree = _open(args.against, folder)
    if not tree.find("sglang.srt.server_args.ServerArgs"):
        raise NotSGLang(f"{args.against}: an sglang without sglang.srt.server_args")
    baseline = args.since or compare.baseline_for(tree.version)
    if args.diff is not None:
        print(_diff(args.diff, _open(baseline, folder), tree), end="")
        return 0
    rows = compare.compare(tree, baseline)
    if args.record is not None:
        _record(args.record, tree)
    print(report(rows, tree.version, baseline, args.against))
    return int(any(row.is_fatal for row in rows))


def report(rows: Sequence[Row], version: str, baseline: str, against: str | None) -> str:
    """Return the report in Markdown: what is gone, what has changed, and how to look at it."""
    targets = Counter(row.state for row in rows if isinstance(row.patch, Patch))
    reached = Counter(row.state for row in rows if isinstance(row.patch, Reach))
    names = Counter(row.state for row in rows if row.patch is None)
    lines = [
        f"SGLang {version}, compared with {baseline}: "
        f"{_counted(targets, 'targets')}; {_counted(names, 'imported names')}; "
        f"{_counted(reached, 'attributes')}."
    ]
    told = [row for row in rows if row.state != SAME]
    if told:
        lines += [
            "",
            "| target, imported name or attribute | state | without it | where |",
            "|---|---|---|---|",
        ]
        lines += [_line(row) for row in told]
    changed = [row for row in told if row.where and row.state != compare.UNKNOWN]
    if changed:
        paths = dict.fromkeys(_path(row) for row in changed)
        option = f" --against {against}" if against else ""
        lines += ["", "Look at each with:", "", "```bash"]
        lines += [f"python tools/sglang_diff{option} --since {baseline} --diff {path}" for path in paths]
        lines += ["```"]
    fatal = [row.label for row in rows if row.is_fatal]
    lines += ["", f"Required and gone: {', '.join(fatal)}." if fatal else "Nothing required is gone."]
    return "\n".join(lines)


def _counted(states: Counter[str], what: str) -> str:
    others = [f"{number} {state}" for state, number in states.items() if state != SAME]
    return ", ".join([f"{states.total()} {what}", f"{states[SAME]} the same", *others])


def _line(row: Row) -> str:
    lost = "" if row.patch is None else row.patch.feature or "DFLASH"
    state = f"{row.state}: {row.detail}" if row.detail else row.state
    return f"| `{row.label}` | {state} | {lost} | {row.where} |"


def _path(row: Row) -> str:
    return row.label.replace(":", ".")


def _diff(target: str, old: SourceTree, new: SourceTree) -> str:
    before, after = _lines(old, target), _lines(new, target)
    if not (before or after):
        raise NotSGLang(f"{target}: neither {old.version} nor {new.version} has it")
    differences = unified_diff(before, after, old.version, new.version, n=5)
    return "".join(differences) or f"{target}: the same text in {old.version} and {new.version}\n"


def _lines(tree: SourceTree, target: str) -> list[str]:
    found = tree.find(target)
    return (tree.text_of(found) if found else "").splitlines(keepends=True)


def _record(file: Path, tree: SourceTree) -> None:
    recorded = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    recorded[tree.version] = compare.record(tree)
    file.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")


def _open(against: str | None, folder: Path) -> SourceTree:
    if against is None:
        return SourceTree.installed()
    if against == "latest" or re.fullmatch(r"\d+(\.\w+)+", against):
        return SourceTree.open(_download(against, folder / against))
    return SourceTree.open(Path(against))


def _download(version: str, folder: Path) -> Path:
    """Download a wheel from the package index. Raises NotSGLang if that fails."""
    requirement = "sglang" if version == "latest" else f"sglang=={version}"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command = [*pip, "--no-deps", "--only-binary=:all:", "--dest", str(folder), requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise NotSGLang(f"pip did not download {requirement} within {_DOWNLOAD_SECONDS} s") from error
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reasons = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        reason = reasons[-1].removeprefix("ERROR: ") if reasons else f"exit status {done.returncode}"
        if "(from versions: none)" in done.stderr:
            reason = "the package index has no version of it, or cannot be reached"
        raise NotSGLang(f"pip cannot download {requirement}: {reason}")
    return wheels[0]


if __name__ == "__main__":
    sys.exit(main())
