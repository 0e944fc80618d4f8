"""Why is my acceptance low?

    python -m sglang_dflash.doctor --model-path TARGET --draft DRAFT [--measure] [--prompts FILE] [--html FILE]

Without a server. Configs and tensor headers are examined first; `--measure` then loads both models in plain
PyTorch and decodes some prompts. Exit status: 0 nothing found (notes do not count), 1 a fault is named, 2
there is nothing to examine."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from sglang_dflash.srt.doctor.checkpoint import BadInput, Checkpoint
from sglang_dflash.srt.doctor.findings import FAULT, Finding


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parse(arguments)
    try:
        return _examine(args)
    except BadInput as error:
        print(f"doctor: {error}", file=sys.stderr)
        return 2


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m sglang_dflash.doctor", description="Why is my acceptance low?"
    )
    parser.add_argument("--model-path", required=True, help="the target, a directory or a hub id")
    parser.add_argument("--draft", required=True, help="the DFlash or P-EAGLE draft, a directory or a hub id")
    parser.add_argument(
        "--measure", action="store_true", help="load both, decode some prompts, report what is accepted"
    )
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help='JSON lines with "text" or "messages"; implies --measure'
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write what was found as a page; implies --measure"
    )
    parser.add_argument(
        "--copy-ahead",
        action="store_true",
        help="what --speculative-copy-ahead would have copied as well; implies --measure",
    )
    parser.add_argument(
        "--max-new-tokens", type=int, default=64, metavar="N", help="to decode per prompt (default: 64)"
    )
    parser.add_argument("--device", help="for --measure (default: cuda where there is one)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="for --measure"
    )
    args = parser.parse_args(arguments)
    if args.max_new_tokens < 2:
        parser.error("--max-new-tokens must be at least 2")
    args.measure = args.measure or args.copy_ahead or args.prompts is not None or args.html is not None
    return args


def _examine(args: argparse.Namespace) -> int:
    # What cannot work is said before anything is loaded.
    draft = Checkpoint.open(args.draft, with_tensors=True)
    target = Checkpoint.open(args.model_path, with_tensors=False)
    if args.html is not None:
        _check_writable(args.html)
    prompts = None
    if args.prompts is not None:
        from sglang_dflash.srt.doctor.prompts import read_prompts

        prompts = read_prompts(args.prompts)
    from sglang_dflash.srt.doctor import report, static_checks

    pair = static_checks.Pair(target, draft)
    found = static_checks.findings(pair)
    print(report.heading(pair), end="\n\n")
    for finding in found:
        print(finding)
    measured = None
    if args.measure and any(finding.is_fatal for finding in found):
        print("Not measured: the draft cannot be loaded as it is.")
    elif args.measure:
        measured, more = _measure(args, pair, prompts)
        found += more
        print(report.figures(measured), end="\n\n")
        for finding in more:
            print(finding)
    print(_verdict(found))
    if args.html is not None:
        from sglang_dflash.srt.doctor.page import page

        try:
            args.html.write_text(page(pair, found, measured), encoding="utf-8")
        except OSError as error:
            raise BadInput(f"{args.html}: {error.strerror or error}") from error
        print(f"Written to {args.html}.")
    return int(any(finding.level == FAULT for finding in found))


def _measure(args, pair, prompts):
    import torch

    from sglang_dflash.srt.doctor import measure
    from sglang_dflash.srt.doctor.prompts import PROMPTS

    try:
        observed = measure.observe(
            pair.target, prompts or PROMPTS, args.max_new_tokens, args.device, getattr(torch, args.dtype)
        )
        measured = measure.measure(pair, observed, args.copy_ahead)
    except torch.OutOfMemoryError as error:
        raise BadInput(
            "the device has too little memory for both models; try --dtype bfloat16 or --device cpu"
        ) from error
    return measured, list(measure.findings(measured))


def _verdict(found: Sequence[Finding]) -> str:
    faults = sum(finding.level == FAULT for finding in found)
    return f"{faults} fault{'s' * (faults > 1)} found." if faults else "No fault found."


def _check_writable(path: Path) -> None:
    folder = path.parent
    if path.is_dir():
        raise BadInput(f"{path}: is a directory, --html names a file")
    if not folder.is_dir():
        raise BadInput(f"{folder}: no such directory")
    existed = path.exists()
    try:
        path.open(
            "a"
        ).close()  # asking for permission first would not say it all: a read-only file system, a special folder
    except OSError as error:
        raise BadInput(f"{path}: cannot be written ({error.strerror or error})") from error
    if not existed:
        path.unlink()


if __name__ == "__main__":
    sys.exit(main())
