"""Write docs/limits.md from the tables and rules that the plugin itself follows.

    python tools/limits.py            # prints the page
    python tools/limits.py --write    # writes it
    python tools/limits.py --check    # exit status 1 if the page is another one; part of `make lint`

Rules without a table are asked: they get arguments or a request that they refuse, and their own words go to
the page.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args
from unittest.mock import patch

from fastapi import HTTPException
from sglang.srt.beam_search.coordinator import BeamCoordinator
from sglang.srt.managers import io_struct
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_dflash.srt.arg_groups import fallback, options, resolve, support
from sglang_dflash.srt.configs import draft_kinds, fields, unsupported
from sglang_dflash.srt.environ import DFlashOptions
from sglang_dflash.srt.hardware_backend.cpu import arguments as cpu
from sglang_dflash.srt.speculative import caps, request_checks
from sglang_dflash.srt.speculative.targets import kinds

PAGE = Path(__file__).parents[1] / "docs" / "limits.md"
INTRODUCTION = """# Limits

What ends the start, falls back to SGLang's built-in DFLASH, is changed, or is answered with HTTP 400. What
works is in [compatibility](compatibility.md). `python tools/limits.py` writes this page from the code.

- **refused**: the start ends, or the request gets HTTP 400. The message names the cause.
- **falls back**: the built-in runs the whole server, unchanged, and one warning says why
  ([who serves](migrating.md#who-serves)). On a CPU refused, as the built-in refuses CPUs.
"""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


def names(values: Iterable[str]) -> str:
    """Return values as inline code, separated by commas."""
    return ", ".join(f"`{value}`" for value in values)


def findings_table(found: Iterable[unsupported.Unsupported]) -> str:
    """Return what is not served, what happens here, and what the built-in does."""
    return table(
        ("what", "here", "built-in"),
        [
            (
                finding.what,
                "falls back" if finding.builtin_supports else "refused",
                f"served{finding.drawback and f'; {finding.drawback}'}"
                if finding.builtin_supports
                else "refused",
            )
            for finding in found
        ],
    )


def flags() -> str:
    """List flags and devices."""
    served = dict(
        speculative_draft_window_size=None, device="cuda", attention_backend=None, tokenizer_worker_num=1
    )
    changes = [{field: "another"} for field, *_ in support._FLAGS]
    changes += [{"speculative_draft_window_size": 0}, {"device": "npu"}]
    changes += [{"device": "cpu", "attention_backend": "flashinfer"}]
    found = [finding for change in changes for finding in ask(support.flag_findings, served | change)]
    backends = support.target_attention_findings("cuda", "another", is_chosen=True)
    heads = support._split_problem(
        SimpleNamespace(tp_size=4, attn_dp_size=1), {"num_attention_heads": 6, "num_key_value_heads": 3}
    )
    listed = findings_table([*found, *backends, unsupported.Unsupported(f"for example {heads}")])
    return f"{listed}\n\nRefused, as SGLang's scheduler would end, for example: {_kept_rows()}"


def _kept_rows() -> str:
    arguments = dict.fromkeys(support._KEEP_ROWS, True) | {"attn_dp_size": 1, "chunked_prefill_size": 2048}
    try:
        support.check_kept_rows(SimpleNamespace(**arguments), max_running_requests=256, block_size=16)
    except ValueError as error:
        return str(error)
    raise AssertionError("4,096 rows are not refused where 2,048 are kept")


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
        {"enable_dp_lm_head": False},
        {"enable_mixed_chunk": True},
        {"disaggregation_mode": "decode"},
        {"device": "cpu"},
    ]
    found = [finding for change in changes for finding in ask(support.dp_attention_findings, served | change)]
    with patch.dict(os.environ, SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION="1"):
        found += ask(support.dp_attention_findings, served)
    with patch.object(support, "read_config", lambda *_: {"architectures": support.SPLIT_EMBEDDINGS}):
        of_target = ask(support.dp_attention_findings, served)
    return (
        findings_table([*found, *of_target])
        + f"\n\nThe last row is also that of {names(support.SPLIT_EMBEDDINGS[1:])}."
    )


def ignored_flags() -> str:
    """List flags that have no effect."""
    rows = [(f"`{support.flag_of(field)}`", reason) for field, _, reason in resolve._IGNORED_FLAGS]
    return table(("flag", "why it is ignored"), rows)


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
        said.append(f"- {warning.call_args.args[1]}")
    return "\n".join(said)


def draft_fields() -> str:
    """List the fields of a draft's config that another model has."""
    by_field: dict[unsupported.FieldRule, list[str]] = {}
    for name, field in unsupported.FIELDS.items():
        by_field.setdefault(field, []).append(f"{name}*" if name.endswith("_") else name)
    rows = []
    for field, found in by_field.items():
        by_builtin = field.means not in unsupported.BUILTIN_LACKS
        here = ("falls back", "served") if by_builtin else ("refused", "refused")
        rows.append((names(found), f"`{field.words}`", field.means.rstrip(","), *here))
    named = [
        f"`{value}` is {means}: {'refused' if means in unsupported.BUILTIN_LACKS else 'falls back'}"
        for value, means in unsupported.NAMED.items()
    ]
    others = names(unsupported.BUILTIN_ARCHITECTURES)
    kinds_of_rope = names(get_args(fields.RopeKind))
    return (
        table(("field", "read, beside null", "other values stand for", "here", "built-in"), rows)
        + f"\n\nOther values with a name: {'; '.join(named)}. A Domino projector's sizes say nothing beside "
        "a `projector_type` that is read."
        + f"\n\nThe architectures {others} fall back too, and a RoPE of another kind than {kinds_of_rope}."
    )


def attention() -> str:
    """List attention backends of target and draft on CUDA."""
    backends = dict.fromkeys((*support.TARGET_ATTENTION_BACKENDS, *unsupported.DRAFT_ATTENTION_BACKENDS))
    rows = []
    for backend in backends:
        limits = []
        if backend in unsupported.COUNT_WINDOW_FROM_ANCHOR:
            limits.append("not for windows counted from the query (z-lab, P-EAGLE)")
        if backend in unsupported.COUNT_WINDOW_FROM_QUERY:
            limits.append("not for windows counted from the anchor (`speculators` DFlash)")
        if backend in unsupported.PAGED_BACKENDS:
            limits.append("P-EAGLE: pages of one slot")
        drafts = (
            "; ".join(limits) if backend in unsupported.DRAFT_ATTENTION_BACKENDS else "on another backend"
        )
        rows.append((f"`{backend}`", drafts))
    return table(("target verifies on", "draft"), rows)


def targets() -> str:
    """List the targets by what is known of them."""
    wrong = [f"`{name}` (SGLang captures {why})" for name, why in kinds._CAPTURES_WRONG_STATES.items()]
    return "\n".join(
        (
            f"- Compared with Hugging Face's states: {names(kinds.VERIFIED_TARGETS)}.",
            f"- Refused: {', '.join(wrong)}, and classes whose hidden states SGLang does not capture.",
            "- Any other class: served with a warning.",
            f"- Refused: targets with {names(kinds._N_GRAM_FIELDS)}, as a verify would embed other n-grams.",
            f"- A draft may read the last layer of {names(draft_kinds._CAPTURES_LAST_LAYER)}; "
            "of others it is refused, as SGLang does not capture it.",
        )
    )


def on_a_cpu() -> str:
    """List what a CPU does not serve, and its caps."""
    features = [f"- Refused: {name}." for *_, name in cpu.FEATURES]
    return "\n".join(
        (
            *features,
            "- Refused: targets with recurrent layers other than "
            f"{names(cpu.RECURRENT_TARGETS)} (types of text models).",
            f"- Attention runs on `{cpu.CPU_ATTENTION_BACKEND}`.",
            f"- Without `--mem-fraction-static`: {cpu.CPU_MAX_TOTAL_TOKENS:,} tokens of KV and "
            f"{cpu.CPU_MAX_RECURRENT_STATES} recurrent states, unless given.",
        )
    )


def requests() -> str:
    """List what a request is refused for, in the words of its HTTP 400."""
    rows = [
        (f"`{field}`", said) for field, said in (*_of_the_front_end(), *_of_the_scheduler(), *_of_sglang())
    ]
    return table(("field", "HTTP 400"), rows)


def _of_the_front_end() -> Iterable[tuple[str, str]]:
    for field, value in (("n", request_checks.MAX_ANSWERS + 1), ("stop_regex", "("), ("temperature", "hot")):
        try:
            request_checks._check_sampling({field: value})
        except ValueError as error:
            yield field, str(error)


def _of_the_scheduler() -> Iterable[tuple[str, str]]:
    model = SimpleNamespace(vocab_size=1000)
    served = dict(
        return_hidden_states=False,
        token_ids_logprob=None,
        top_logprobs_num=0,
        logprob_start_len=-1,
        input_embeds=None,
    )
    bad: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
        ("return_hidden_states", {"return_hidden_states": True}, {}),
        ("min_p", {}, {"min_p": 0.1}),
        ("regex", {}, {"regex": "a"}),
        ("custom_params", {}, {"custom_params": {caps.FIELD: -1}}),
        ("stop_token_ids", {}, {"stop_token_ids": [1000]}),
        ("top_k", {}, {"top_k": request_checks.MAX_TOP_K + 1}),
        ("top_logprobs_num", {"top_logprobs_num": 1001}, {}),
        ("logprob_start_len", {"logprob_start_len": -2}, {}),
        ("input_embeds", {"input_embeds": [[0.0]]}, {}),
    )
    execution = SimpleNamespace(
        deterministic=SimpleNamespace(enable_deterministic_inference=True),
        kernel=SimpleNamespace(grammar_backend="outlines"),
    )
    with patch.object(request_checks, "get_exec", lambda: execution):
        for field, of_request, sampling in bad:
            params = SamplingParams(**sampling)
            request = SimpleNamespace(**served | of_request, sampling_params=params)
            said = request_checks.find_problem(request, model)
            assert said is not None, field
            yield field, said


def _of_sglang() -> Iterable[tuple[str, str]]:
    coordinator = SimpleNamespace(spec_algorithm=SpeculativeAlgorithm.DFLASH)
    request = SimpleNamespace(sampling_params=SamplingParams(beam_width=2))
    yield "beam_width", BeamCoordinator.validate_and_init(coordinator, request, None)


def control_calls() -> str:
    """Name the control requests that a CPU server refuses, in the words of its HTTP 400."""
    try:
        cpu.refuse_memory_release(lambda *_: None, None, io_struct.ReleaseMemoryOccupationReqInput())
    except HTTPException as refusal:
        said = refusal.detail
    return f"`/release_memory_occupation` and `/resume_memory_occupation`: {said}"


def fallback_rules() -> str:
    """List what forbids the fallback, and what it loses."""
    *others, last = fallback.OPTIONS_OF_OURS
    return (
        f"The start ends instead of falling back if one of {names(others)} or {names([last])} is given, "
        "with a `speculators` or P-EAGLE checkpoint, and with `--speculative-dflash-strict`. Otherwise the "
        "built-in gets the server, and may refuse it.\n\n"
        f"A server that falls back has no {', no '.join(fallback.BUILTIN_LACKS)}."
    )


def basic_mode() -> str:
    """List what basic mode switches off."""
    parts = [*options._OFF_IN_BASIC_MODE, *options._EXTRA, "ReplaySSM"]
    return (
        f"`{DFlashOptions.BASIC_MODE.variable}=1` switches these off, on a CPU too, whatever the flags say: "
        f"{', '.join(parts)}. Set it first if something goes wrong: if the fault stays, none of them is its "
        "cause. One line of the log lists them."
    )


SECTIONS: dict[str, Callable[[], str]] = {
    "Flags and devices": flags,
    "DP attention": dp_attention,
    "The fallback": fallback_rules,
    "Flags without an effect": ignored_flags,
    "Adaptive width verifies whole blocks": whole_blocks,
    "Basic mode": basic_mode,
    "Fields of a draft": draft_fields,
    "Attention backends on CUDA": attention,
    "Targets": targets,
    "On a CPU": on_a_cpu,
    "Requests": requests,
    "Control endpoints on a CPU": control_calls,
}
LEADS = {
    "Control endpoints on a CPU": "HTTP 400, as SGLang's scheduler would end. Others answer as in SGLang, "
    "[where some end the scheduler](dev/upstream/control-requests.md), with a draft or without.",
    "DP attention": "Served with `--enable-dp-lm-head`, all drafts and recurrent states. Not served:",
    "Flags without an effect": "A warning names them.",
    "Adaptive width verifies whole blocks": "A warning says so if it was requested and is:",
    "Requests": "A request whose logits contain NaN or infinity ends alone (`NaN happened`). Examples "
    "of what is refused, on a target of 1,000 tokens, with deterministic inference and outlines:",
    "Fields of a draft": "In `dflash_config`, and at the top level. Values have types, and words may be in "
    "capitals. Fields that are neither listed here nor read are named in one warning, as are a trainer's "
    "settings: what ends in `_loss_weight` or `_loss_decay…`, and a `_gamma` or `_ratio` of a loss, mask, "
    "noise, warmup, decay or dropout.",
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
