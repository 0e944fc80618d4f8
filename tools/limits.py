"""Write docs/limits.md from the tables and rules that the plugin itself follows.

    python tools/limits.py            # prints the page
    python tools/limits.py --write    # writes it
    python tools/limits.py --check    # exit status 1 if the page is another one; part of `make lint`

Rules without a table are asked: they get arguments that they refuse, and their words go to the page.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from sglang_dflash.srt.arg_groups import fallback, options, resolve, support
from sglang_dflash.srt.configs import draft_kinds, layer_fields, unsupported
from sglang_dflash.srt.environ import DFlashOptions
from sglang_dflash.srt.hardware_backend.cpu import arguments as cpu
from sglang_dflash.srt.speculative import request_checks
from sglang_dflash.srt.speculative.targets import kinds

PAGE = Path(__file__).parents[1] / "docs" / "limits.md"
INTRODUCTION = """# Limits

```bash
python -m sglang_dflash.doctor --serve "YOUR COMMAND"    # before a start
```

*Refused* ends the start. *Falls back* means that the built-in runs the whole server
([who serves](migrating.md#who-serves)); on a CPU it means refused. A message names the cause.
`python tools/limits.py` writes this page from the code.
"""


def names(values: Iterable[str]) -> str:
    """Return values as inline code, separated by commas."""
    return ", ".join(f"`{value}`" for value in values)


def outcomes(found: Iterable[unsupported.Unsupported]) -> str:
    """Return two lists: what is refused here, and what falls back."""
    lists: dict[bool, list[str]] = {False: [], True: []}
    for finding in found:
        lists[finding.builtin_supports].append(finding.what)
    heads = {False: "Refused", True: "Falls back"}
    return "\n".join(f"- {heads[key]}: {'; '.join(texts)}." for key, texts in lists.items() if texts)


def flags() -> str:
    """List flags and devices."""
    served = dict(
        speculative_draft_window_size=None, device="cuda", attention_backend=None, tokenizer_worker_num=1
    )
    changes = [{field: "another"} for field, *_ in support._FLAGS]
    changes += [{"speculative_draft_window_size": 0}, {"device": "npu"}]
    found = [finding for change in changes for finding in ask(support.flag_problems, served | change)]
    ignored = names(support.flag_of(field) for field, *_ in resolve._IGNORED_FLAGS)
    return (
        f"{outcomes(found)}\n- Ignored, with a warning: {ignored}.\n"
        "- Refused: more ranks than the draft's heads can be split over, and buffers of SGLang with too few "
        f"rows for a verify ({names(support.flag_of(field) for field in support._KEEP_ROWS)})."
    )


def ask(rule: Callable[[Any], Any], arguments: dict[str, Any]) -> Any:
    """Return what a rule says of these server arguments."""
    return rule(SimpleNamespace(**arguments))


def dp_attention() -> str:
    """List what does not go with DP attention."""
    served = dict(
        attn_dp_size=2,
        tp_size=4,
        enable_dp_lm_head=True,
        enable_mixed_chunk=False,
        disaggregation_mode="null",
        device="cuda",
        model_path=None,
        revision=None,
    )
    changes: list[dict[str, Any]] = [
        {"enable_mixed_chunk": True},
        {"disaggregation_mode": "decode"},
        {"device": "cpu"},
    ]
    found = [finding for change in changes for finding in ask(support.dp_attention_problems, served | change)]
    said = " with DP attention (--enable-dp-attention)"
    short = [replace(finding, what=finding.what.replace(said, "")) for finding in found]
    split = len(support.SPLIT_EMBEDDINGS)
    return f"{outcomes(short)}\n- Falls back: {split} classes, as Llama, that split their embedding."


def whole_blocks() -> str:
    """List settings with which adaptive width verifies whole blocks."""
    served = dict(
        enable_linear_replayssm_spec=False,
        attn_dp_size=1,
        enable_lora=False,
        lora_paths=None,
        device="cuda",
        speculative_adaptive_config=None,
    )
    said = []
    changes: tuple[tuple[dict[str, Any], str], ...] = (
        ({"enable_linear_replayssm_spec": True}, ""),
        ({"attn_dp_size": 2}, ""),
        ({"enable_lora": True}, ""),
        ({}, "4"),
    )
    for change, simulated in changes:
        environment = {"SGLANG_SIMULATE_ACC_LEN": simulated}
        args = SimpleNamespace(**served | change)
        with patch.dict(os.environ, environment), patch.object(options.logger, "warning") as warning:
            options.resolve_adaptive(args, True, 8, is_recurrent=True)
        said.append(f"- {warning.call_args.args[1].removeprefix('not supported ')}")
    return "\n".join(said)


def draft_fields() -> str:
    """List the fields of a draft's config that another model has."""
    by_outcome: dict[bool, list[str]] = {False: [], True: []}
    for name, field in unsupported.FIELDS.items():
        shown = f"{name}*" if name.endswith("_") else name
        by_outcome[field.means not in unsupported.BUILTIN_LACKS].append(shown)
    return "\n".join(
        (
            f"- Refused: {names(by_outcome[False])}.",
            f"- Falls back: {names(by_outcome[True])}; {names(unsupported.BUILTIN_ARCHITECTURES)}; a RoPE "
            f"that is none of {names(layer_fields.ROPE_KINDS)}.",
        )
    )


def attention() -> str:
    """List attention backends of target and draft on CUDA."""
    drafts = unsupported.DRAFT_ATTENTION_BACKENDS
    from_query = [name for name in drafts if name not in unsupported.COUNT_WINDOW_FROM_ANCHOR]
    from_anchor = [name for name in drafts if name not in unsupported.COUNT_WINDOW_FROM_QUERY]
    return "\n".join(
        (
            f"- Target: {names(support.TARGET_ATTENTION_BACKENDS)}. Another one falls back.",
            f"- Draft: {names(drafts)}. A sliding window needs {names(from_query)}; that of a `speculators` "
            f"DFlash draft needs {names(from_anchor)}.",
            f"- P-EAGLE on {names(unsupported.PAGED_BACKENDS)} has pages of one slot.",
        )
    )


def targets() -> str:
    """List the targets by what is known of them."""
    return "\n".join(
        (
            f"- Refused: {names(kinds._CAPTURES_WRONG_STATES)}, classes whose hidden states SGLang does not "
            f"capture, and targets with {names(kinds._N_GRAM_FIELDS)}.",
            f"- Compared with Hugging Face: {len(kinds.VERIFIED_TARGETS)} classes "
            "([table](compatibility.md#targets)). Others get a warning.",
            f"- A draft may read the last layer of {len(draft_kinds._CAPTURES_LAST_LAYER)} classes alone.",
        )
    )


def on_a_cpu() -> str:
    """List what a CPU does not serve, and its caps."""
    refused = "; ".join(name for *_, name in cpu.FEATURES)
    return "\n".join(
        (
            f"- Refused: {refused}; recurrent targets other than {names(cpu.RECURRENT_TARGETS)}; "
            "`/release_memory_occupation` and `/resume_memory_occupation`.",
            f"- Attention runs on `{cpu.CPU_ATTENTION_BACKEND}`. By default a server has "
            f"{cpu.CPU_MAX_TOTAL_TOKENS:,} tokens of KV and {cpu.CPU_MAX_RECURRENT_STATES} recurrent states.",
        )
    )


def fallback_rules() -> str:
    """List what forbids the fallback, and what it loses."""
    return (
        f"The start ends instead with {names(fallback.OPTIONS_OF_OURS)} or `--speculative-dflash-strict`, "
        "and with a `speculators` or P-EAGLE checkpoint. The built-in may refuse a server too. "
        f"It lacks: {', '.join(fallback.BUILTIN_LACKS)}."
    )


def basic_mode() -> str:
    """List what basic mode switches off."""
    parts = [*options._OFF_IN_BASIC_MODE, *options._EXTRA, "ReplaySSM"]
    return (
        f"`{DFlashOptions.BASIC_MODE.variable}=1` switches off, whatever the flags say: {', '.join(parts)}. "
        "A fault that stays is elsewhere, or in "
        "[what stays on](compatibility.md#on-by-default-on-cuda-and-never-run-there)."
    )


REQUESTS = f"""HTTP 400 names the field: `input_embeds`, `return_hidden_states`, beam search; `min_p` with
deterministic inference; grammars of outlines; `n` above {request_checks.MAX_ANSWERS:,}; values of other types
or out of range. A request whose logits contain NaN or infinity ends alone (`NaN happened`)."""


SECTIONS: dict[str, Callable[[], str]] = {
    "Flags and devices": flags,
    "DP attention": dp_attention,
    "The fallback": fallback_rules,
    "Adaptive width verifies whole blocks": whole_blocks,
    "Basic mode": basic_mode,
    "Fields of a draft": draft_fields,
    "Attention backends on CUDA": attention,
    "Targets": targets,
    "On a CPU": on_a_cpu,
    "Requests": lambda: REQUESTS,
}
LEADS = {
    "DP attention": "Served with `--enable-dp-lm-head`, but:",
    "Adaptive width verifies whole blocks": "With a warning, because it is not supported:",
    "Fields of a draft": "With values of another model. One warning names other fields that are not read.",
}


def page() -> str:
    """Return the whole page."""
    parts = [INTRODUCTION]
    for title, write in SECTIONS.items():
        lead = f"{LEADS[title]}\n\n" if title in LEADS else ""
        parts.append(f"## {title}\n\n{lead}{write()}\n")
    return "\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write docs/limits.md")
    parser.add_argument("--check", action="store_true", help="compare docs/limits.md with the code")
    args = parser.parse_args(arguments)
    text = page()
    if args.check:
        if PAGE.read_text() == text:
            return 0
        print("docs/limits.md is not what the code says: run python tools/limits.py --write", file=sys.stderr)
        return 1
    if args.write:
        PAGE.write_text(text)
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
