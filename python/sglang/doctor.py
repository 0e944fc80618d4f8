"""Find out why acceptance is low, or what a server would do, without a server.

    python -m sglang_dflash.doctor --model-path TARGET --draft DRAFT [--measure] [--prompts FILE] [--json]
    [--html FILE] [--num-draft-tokens N]
    python -m sglang_dflash.doctor --model-path TARGET --compare SERVED NEW --texts FILE [--general FILE]
    [--json]
    python -m sglang_dflash.doctor --serve "COMMAND OF A SERVER" [--device cuda] [--json]

Configs and tensor headers are examined first. `--measure` then loads both models in plain PyTorch and decodes
some prompts. Exit status: 0 nothing found (notes do not count), 1 a fault is named, 2 nothing to examine.

`--compare` says whether a new draft should take a served one's place. Exit status: 0 it should, 1 it should
not, 2 they cannot be compared.

`--serve` resolves the flags as a server does, and loads no weights. Exit status: 0 ours serves, 1 SGLang's
built-in DFLASH serves, 2 neither does.
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import dropwhile, takewhile
from pathlib import Path

from sglang_dflash.srt.doctor.pair import FAULT, PROMPTS, BadInput, Checkpoint, Pair, read_prompts


def main(arguments: Sequence[str] | None = None) -> int:
    """Examine a draft as the command does, and print what is found.

    Args:
        arguments: the command's words. None: those of this process.

    Returns:
        The exit status.

    Example:
        The bundled pair, from the repository's root::

            >>> from sglang_dflash import doctor
            >>> pair = ["--model-path", "models/tiny-qwen3-code", "--draft", "models/tiny-qwen3-code-dflash"]
            >>> status = doctor.main(pair)
            target  models/tiny-qwen3-code: Qwen3ForCausalLM, 12 layers, hidden size 256, 2048 tokens
            draft   models/tiny-qwen3-code-dflash: DFlash (z-lab format), 3 layers, ...
            served by sglang-dflash, if no flag or device says otherwise
            <BLANKLINE>
            No fault found.
            >>> status
            0
    """
    args = _parse(arguments)
    run = _compare if args.compare else _examine if args.serve is None else _serve
    try:
        return run(args)
    except (BadInput, OSError) as error:
        print(f"doctor: {error}", file=sys.stderr)
    except Exception:
        traceback.print_exc()  # Python would exit with 1, which is a verdict
    return 2


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m sglang_dflash.doctor", description="Why is my acceptance low?"
    )
    add = parser.add_argument
    add("--model-path", help="the target, a directory or a hub id")
    add("--draft", help="the DFlash or P-EAGLE draft, a directory or a hub id")
    add("--serve", metavar="COMMAND", help="say who would serve this command line of launch_server, and how")
    help_compare = "say whether draft NEW should take the place of draft SERVED"
    add("--compare", nargs=2, metavar=("SERVED", "NEW"), help=help_compare)
    help_texts = "for --compare: a record, of which a tenth is held out, or prompts as of --prompts"
    add("--texts", type=Path, metavar="FILE", help=help_texts)
    add("--general", type=Path, metavar="FILE", help="for --compare: texts on which NEW may not be worse")
    add("--measure", action="store_true", help="load both models, decode some prompts, report the acceptance")
    help_prompts = 'JSON lines with "text" or "messages"; implies --measure'
    add("--prompts", type=Path, metavar="FILE", help=help_prompts)
    add("--json", action="store_true", help="print the report as JSON, and the text to stderr")
    add("--html", type=Path, metavar="FILE", help="write the findings as a page; implies --measure")
    help_tokens = "tokens to decode per prompt (default: 64)"
    add("--max-new-tokens", type=int, default=64, metavar="N", help=help_tokens)
    help_block = "draft blocks of N tokens, anchor included, instead of the trained size; implies --measure"
    add("--num-draft-tokens", type=int, metavar="N", help=help_block)
    add("--device", help="default: cuda if there is one")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of loaded models")
    args = parser.parse_args(arguments)
    if args.compare and (args.model_path is None or args.texts is None):
        parser.error("--compare needs --model-path and --texts")
    if not args.compare and args.serve is None and (args.model_path is None or args.draft is None):
        parser.error("--model-path and --draft are needed, or --compare, or --serve")
    if args.max_new_tokens < 2:
        parser.error("--max-new-tokens must be at least 2")
    if args.num_draft_tokens is not None and args.num_draft_tokens < 2:
        parser.error("--num-draft-tokens must be at least 2")
    implied = any(value is not None for value in (args.prompts, args.html, args.num_draft_tokens))
    args.measure = args.measure or implied
    return args


def _compare(args: argparse.Namespace) -> int:
    import torch

    from sglang_dflash.srt.doctor import compare

    target = Checkpoint.open(args.model_path, with_tensors=False)
    served, new = (Pair(target, Checkpoint.open(path, with_tensors=True)) for path in args.compare)
    for path in filter(None, (args.texts, args.general)):
        if not path.exists():
            raise BadInput(f"{path}: no such file")
    how = {"device": args.device, "dtype": getattr(torch, args.dtype)}
    with _naming_full_memory():
        gate = compare.Gate(served, new=new, max_new_tokens=args.max_new_tokens, **how)
        own = gate.measure(args.texts)
        general = None if args.general is None else gate.measure(args.general)
    against = compare.objections(own, general)
    say = partial(print, file=sys.stderr if args.json else sys.stdout)
    if gate.skipped:
        say(f"Skipped {gate.skipped} lines that are cut short, or no row of a record.")
    say(compare.describe(own, general, against))
    if args.json:
        measured = {"own": own.as_json(), "general": general and general.as_json()}
        print(json.dumps({**measured, "objections": against, "skipped": gate.skipped}, indent=1))
    return int(bool(against))


def _serve(args: argparse.Namespace) -> int:
    import torch

    from sglang_dflash.srt.doctor import serve

    try:
        words = shlex.split(re.sub(r"\\\r?\n", " ", args.serve))  # of a command on several lines
    except ValueError as error:
        raise BadInput(f"--serve: {error}") from error
    words = [*takewhile(lambda word: not re.match(r"[12&]?[|<>&;]", word), words)]
    starts = [place for place, word in enumerate(words, 1) if word in ("sglang.launch_server", "serve")]
    flags = words[starts[0] :] if starts else [*dropwhile(lambda word: not word.startswith("--"), words)]
    for word in words[: len(words) - len(flags)]:
        if found := re.match(r"(\w+)=(.*)", word, re.DOTALL):
            os.environ[found[1]] = found[2]
    if flags and not flags[0].startswith("-"):  # `sglang serve MODEL`
        flags.insert(0, "--model-path")
    if args.device is not None:
        flags += ["--device", args.device]
    answer = serve.examine(flags, is_hopper=args.device == "cuda" and not torch.cuda.is_available())
    print(json.dumps(asdict(answer), indent=1) if args.json else answer)
    return serve.STATUS[answer.served_by]


def _examine(args: argparse.Namespace) -> int:
    # All that cannot work is reported before anything is loaded.
    draft = Checkpoint.open(args.draft, with_tensors=True)
    target = Checkpoint.open(args.model_path, with_tensors=False)
    if args.html is not None:
        args.html.open("a").close()  # an error now, rather than after the measurement
    prompts = PROMPTS if args.prompts is None else read_prompts(args.prompts)
    from sglang_dflash.srt.doctor import report, static_checks

    say = partial(print, file=sys.stderr if args.json else sys.stdout)
    pair = Pair(target, draft)
    if pair.is_parsed and args.num_draft_tokens is not None:
        drafted = args.num_draft_tokens - 1
        num_rows = drafted + pair.config.num_idle_rows
        pair.config = replace(pair.config, block_size=num_rows, speculative_tokens=drafted)
    found = static_checks.findings(pair)
    say(report.heading(pair, found), end="\n\n")
    for finding in found:
        say(finding)
    measured = None
    if args.measure and any(finding.is_fatal for finding in found):
        say("Not measured: the draft cannot be loaded as it is.")
    elif args.measure:
        measured, more = _measure(args, pair, prompts)
        found += more
        say(report.figures(measured), end="\n\n")
        for finding in more:
            say(finding)
    faults = sum(finding.level == FAULT for finding in found)
    say(f"{faults} fault{'s' * (faults > 1)} found." if faults else "No fault found.")
    if args.html is not None:
        args.html.write_text(report.page(pair, found, measured), encoding="utf-8")
        say(f"Written to {args.html}.")
    if args.json:
        print(json.dumps(report.as_json(pair, found, measured), indent=1))
    return int(faults > 0)


def _measure(args, pair, prompts):
    import torch

    from sglang_dflash.srt.doctor import measure

    how = {"device": args.device, "dtype": getattr(torch, args.dtype)}
    with _naming_full_memory():
        observed = measure.observe(pair.target, prompts=prompts, max_new_tokens=args.max_new_tokens, **how)
        measured = measure.measure(pair, observed)
    return measured, list(measure.findings(measured))


@contextlib.contextmanager
def _naming_full_memory() -> Iterator[None]:
    """Raise BadInput with advice if the device's memory is full."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise BadInput(
            "the device has too little memory for the models; try --dtype bfloat16 or --device cpu"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
