"""Compare our patches of SGLang with any version of it, without importing that version.

    python tools/sglang_diff [--against WHEEL | FOLDER | VERSION | latest] [--since VERSION]
                             [--record FILE]

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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from sglang_diff import compare  # noqa: E402
from sglang_diff.compare import SAME, Row  # noqa: E402
from sglang_diff.source_tree import NotSGLang, SourceTree  # noqa: E402


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
    add("--record", type=Path, metavar="FILE", help="add this version's fingerprints to a JSON file")
    args = parser.parse_args(arguments)
    supported = compare.supported_versions()
    if args.since is not None and args.since not in supported:
        parser.error(f"--since {args.since}: recorded versions are {', '.join(supported)}")
    return args


def _run(args: argparse.Namespace, folder: Path) -> int:
    tree = _open(args.against, folder)
    if not tree.find("sglang.srt.server_args.ServerArgs"):
        raise NotSGLang(f"{args.against}: an sglang without sglang.srt.server_args")
    baseline = args.since or compare.baseline_for(tree.version)
    rows = compare.compare(tree, baseline)
    if args.record is not None:
        _record(args.record, tree)
    print(report(rows, tree.version, baseline))
    return int(any(row.is_fatal for row in rows))


def report(rows: Sequence[Row], version: str, baseline: str) -> str:
    """Return the report in Markdown: what is gone, and what has changed."""
    counts = [f"{number} {state}" for state, number in Counter(row.state for row in rows).items()]
    lines = [f"Names of SGLang {version}, compared with {baseline}: {', '.join(counts)}."]
    if told := [row for row in rows if row.state != SAME]:
        lines += [
            "",
            "| target, imported name or attribute | state | without it | where |",
            "|---|---|---|---|",
        ]
        lines += [_line(row) for row in told]
    fatal = [row.label for row in rows if row.is_fatal]
    lines += ["", f"Required and gone: {', '.join(fatal)}." if fatal else "Nothing required is gone."]
    return "\n".join(lines)


def _line(row: Row) -> str:
    lost = "" if row.patch is None else row.patch.feature or "DFLASH"
    state = f"{row.state}: {row.detail}" if row.detail else row.state
    return f"| `{row.label}` | {state} | {lost} | {row.where} |"


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
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise NotSGLang(f"pip cannot download {requirement}: {reason}")
    return wheels[0]


if __name__ == "__main__":
    sys.exit(main())
