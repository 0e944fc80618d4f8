"""What the pages for users name is there and is used: flags, endpoints, fields of requests, files.

Each name has the test that uses it, or the reason why none can. A name without either fails, and a name that
no page has any more. The commands of the pages run in test_documented_commands.py.
"""

import argparse
import dataclasses
import re
import subprocess
from pathlib import Path

import msgspec
import pytest
import sglang
from serving import ROOT
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams
from support.documented import PAGES, commands, defined_flags, spans

from sglang_dflash.srt.arg_groups.options import make_add_cli_args

TESTS = ROOT / "test" / "srt"
# limits.md is written from the code, and lists what is refused or ignored.
USER_PAGES = [
    page
    for page in (*PAGES, ROOT / "SECURITY.md")
    if page.name not in ("CHANGELOG.md", "limits.md") and page.parent.name != "dev"
]
ALL_PAGES = [*USER_PAGES, *PAGES, *sorted((ROOT / "docs").rglob("*.md")), ROOT / "CONTRIBUTING.md"]

# Test file -> flags of servers in it.
FLAGS = {
    "server/test_control_endpoints.py": (
        *("--reasoning-parser", "--enable-strict-thinking", "--api-key", "--admin-api-key"),
        *("--trust-remote-code", "--revision", "--speculative-draft-model-revision"),
        *("--speculative-draft-head-dtype", "--speculative-dflash-strict"),
        *("--disable-cuda-graph", "--cuda-graph-max-bs-decode"),
    ),
    "support/servers.py": (
        *("--dtype", "--max-total-tokens", "--decode-log-interval", "--model-path", "--sleep-on-idle"),
        *("--speculative-adaptive", "--speculative-adaptive-config", "--speculative-copy-ahead"),
    ),
    "engine/test_limits.py": (
        *("--speculative-algorithm", "--speculative-draft-model-path", "--speculative-num-draft-tokens"),
        *("--max-running-requests", "--no-speculative-adaptive", "--disable-radix-cache", "--page-size"),
    ),
    "server/test_examples.py": ("--tool-call-parser",),
    "server/test_metrics.py": ("--enable-metrics", "--disable-overlap-schedule"),
    "engine/test_logit_processors.py": (
        "--enable-custom-logit-processor",
        "--enable-deterministic-inference",
    ),
    "engine/test_lossless.py": (
        *("--enable-mixed-chunk", "--speculative-dflash-block-size", "--speculative-draft-window-size"),
    ),
    "engine/test_lossless_hybrid.py": ("--enable-linear-replayssm-spec", "--mamba-track-interval"),
    "engine/test_hybrid_eviction.py": ("--mamba-radix-cache-strategy",),
    "engine/test_sampled_requests.py": (
        *("--speculative-draft-sample-method", "--speculative-use-rejection-sampling"),
    ),
    "long/test_dp_attention.py": (
        *("--dist-init-addr", "--dp-size", "--enable-dp-attention", "--enable-dp-lm-head", "--tp-size"),
    ),
    "long/test_long_context.py": ("--mem-fraction-static",),
    "unit/requests/test_streamed_calls.py": ("--tokenizer-worker-num",),
}
NO_SERVER = {
    "--load-format": "of benchmarks with weights of noise: unit/tools/test_gpu_benchmark.py parses it",
    "--speculative-plans-within-bounds": "GPU: of FlashInfer; the rehearsal turns it on",
    "--device": "of the doctor's command lines; every server here has the CPU",
    "--model": "of clients and of the speculators library",
    "--port": "every server here has one, from benchmark/serving.py",
    "--speculative-draft-attention-backend": "GPU: a CPU has one backend; the rehearsal chooses others",
    "--speculative-draft-model-quantization": "SGLang's; a quantized draft is dequantized without it",
    "--speculative-use-block-verification": "GPU: refused on a CPU",
    "--speculative-draft-kv-cache-dtype": "GPU: SGLang's flag; a CPU has no fp8 KV",
    "--speculative-accept-threshold-single": "ignored with a warning: unit/arg_groups/test_resolve.py",
    "--quantization": "GPU: a CPU has no kernels for quantized targets",
    "--enable-linear-replayssm": "refused by SGLang",
    "--mamba-full-memory-ratio": "sizes only: unit/targets/test_state_memory.py",
    "--mamba-ssm-dtype": "sizes only: unit/targets/test_state_memory.py",
}
OTHER_PROGRAMS = {
    "--speculative-config": "vLLM's",
    "--disable-ignore-eos": "sglang.benchmark.serving's",
    "--per-chunk-usage": "aiperf's",
    "--draft-vocab-size": "the speculators library's",
}

# Test file -> endpoints, and fields of requests.
ENDPOINTS = {
    "server/test_control_endpoints.py": (
        *("/generate", "/server_info", "/v1/chat/completions", "/update_weights_from_disk"),
        *("/begin_weight_update", "/end_weight_update", "/update_weights_from_ipc"),
    ),
    "server/test_metrics.py": ("/metrics",),
}
FIELDS = {
    "server/test_control_endpoints.py": (
        *("custom_params", "thinking_budget", "max_thinking_tokens", "sampling_params"),
        "chat_template_kwargs",
    ),
    "server/test_requests.py": ("speculative_max_tokens", "min_new_tokens"),
    "engine/test_sampled_requests.py": ("min_p",),
    "support/scheduled.py": ("return_sampling_mask",),
}
# Names of other things on these pages: prompts of the doctor, rows of training data, weights, a number.
OTHER_FIELDS = {"input_ids", "messages", "model", "n", "text", "tools"}


def server_flags() -> set[str]:
    """Return the flags of SGLang's servers, with ours."""
    parser = argparse.ArgumentParser()
    make_add_cli_args()(parser)
    return {flag for action in parser._actions for flag in action.option_strings}


def flags_of(page: Path) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]+", page.read_text()))


def fields_of(request: type) -> set[str]:
    """Return the names of a request's fields."""
    if dataclasses.is_dataclass(request):
        return {field.name for field in dataclasses.fields(request)}
    if issubclass(request, msgspec.Struct):
        return {field.name for field in msgspec.structs.fields(request)}
    return set(request.model_fields)


def named_flags() -> set[str]:
    return set().union(*map(flags_of, USER_PAGES)) & server_flags()


def named_endpoints() -> set[str]:
    found = [re.fullmatch(r"(?:[A-Z]+ )?(/[a-z][\w/]*)", span) for page in USER_PAGES for span in spans(page)]
    return {match.group(1) for match in found if match}


def named_fields() -> set[str]:
    known = set().union(
        *map(fields_of, (SamplingParams, GenerateReqInput, ChatCompletionRequest, CompletionRequest))
    )
    known |= {"speculative_max_tokens", "thinking_budget"}
    words = {
        word
        for page in USER_PAGES
        for span in spans(page)
        if not span.startswith(("-", "python", "vllm"))
        for word in re.findall(r"\w+", span)
    }
    return words & known - OTHER_FIELDS


@pytest.mark.parametrize(
    "named, used, reasons",
    [(named_flags, FLAGS, NO_SERVER), (named_endpoints, ENDPOINTS, {}), (named_fields, FIELDS, {})],
    ids=["flags", "endpoints", "fields"],
)
def test_what_pages_name_is_used_by_a_test(named, used, reasons):
    names = named()
    listed = {name for group in used.values() for name in group} | set(reasons)
    assert names, "no page names any: are they still found?"
    assert not names - listed, f"named on a page, and used by no test: {sorted(names - listed)}"
    assert not listed - names, f"on no page any more: {sorted(listed - names)}"
    for file, group in used.items():
        text = (TESTS / file).read_text()
        unused = [name for name in group if not re.search(rf"{re.escape(name)}(?![\w-])", text)]
        assert not unused, f"{file} does not use {unused}"


def test_flags_of_other_programs_are_theirs():
    """A flag that is no server's is that of a documented command or of a script of ours."""
    scripts = [
        *(ROOT / "python").rglob("*.py"),
        *(ROOT / "benchmark").glob("*.py"),
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
