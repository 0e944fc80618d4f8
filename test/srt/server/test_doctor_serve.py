"""`doctor --serve` says what a server then does: on a CPU, and on a GPU that this machine lacks.

For the GPU its answers are compared with our step of SGLang's argument pipeline, run by itself, and on the
CPU with servers that start, or end.
"""

import json
import shlex
from argparse import ArgumentParser
from pathlib import Path

import pytest
from serving import DRAFT, HYBRID_DRAFT, HYBRID_TARGET, SPECULATORS_DRAFT, TARGET, dflash_arguments, serve
from sglang.srt.arg_groups import speculative_hook
from sglang.srt.arg_groups.model_override_base import resolving_view
from sglang.srt.server_args import ServerArgs
from support.drafts import make_draft, read_config
from support.quantized_drafts import write_quantized
from support.servers import ENVIRONMENT, run_to_end, warm_start

from sglang_dflash.srt import patching
from sglang_dflash.srt.arg_groups.implementation import Implementation
from sglang_dflash.srt.arg_groups.options import add_flags
from sglang_dflash.srt.doctor.serve import BUILT_IN, NOT_LOADED, OURS, REFUSED, STATUS
from sglang_dflash.srt.environ import DFlashOptions, Option
from sglang_dflash.srt.plugins import algorithm, entry_points

pytestmark = pytest.mark.server

PAIR = ["--model-path", str(TARGET), *dflash_arguments()]


@pytest.fixture(scope="module")
def drafts(tmp_path_factory) -> dict[str, Path]:
    """A quantized draft, and one with Gemma's norm, which only the built-in runs, and only on a GPU."""
    folder = tmp_path_factory.mktemp("drafts")
    gemma = make_draft(folder / "gemma", base=DRAFT, use_gemma_norm=True)
    return {"GEMMA": gemma, "W4A16": write_quantized(folder / "packed", DRAFT, "W4A16")}


# name -> (arguments, with a draft's name for its path; who serves; words of the reason)
ON_A_GPU = {
    "the defaults": ([], OURS, ""),
    "copies and own lengths": (["--speculative-copy-ahead", "--speculative-adaptive"], OURS, ""),
    "recurrent states": (["--model-path", str(HYBRID_TARGET), *dflash_arguments(HYBRID_DRAFT)], OURS, ""),
    "a draft of the built-in's": (dflash_arguments("GEMMA"), BUILT_IN, "Gemma's RMSNorm"),
    "a draft to quantize": (["--speculative-draft-model-quantization", "awq"], BUILT_IN, "awq"),
    "strict": ([*dflash_arguments("GEMMA"), "--speculative-dflash-strict"], REFUSED, "strict forbids it"),
    "heads that cannot be split": (["--tp-size", "3"], REFUSED, "cannot be split over --tp 3"),
}


def examine(*arguments: str, device: str = "") -> tuple[int, dict]:
    """Run the command as a user does. Return its exit status, and its report."""
    more = ("--device", device) if device else ()
    done = run_to_end(
        "-m", "sglang_dflash.doctor", "--serve", shlex.join(arguments), "--json", *more, timeout=900
    )
    start = done.output.find('{\n "served_by"')
    assert start >= 0, done.output
    report, _ = json.JSONDecoder().raw_decode(done.output, start)
    return done.code, report


@pytest.fixture(scope="module")
def answers(drafts) -> dict[str, dict]:
    """Answers for the command lines on a GPU, by name."""
    lines = {name: arguments for name, (arguments, *_) in ON_A_GPU.items()}
    lines["a quantized draft"] = dflash_arguments("W4A16")
    return {
        name: examine(*PAIR, *with_draft(arguments, drafts), device="cuda")[1]
        for name, arguments in lines.items()
    }


def with_draft(arguments: list[str], drafts: dict[str, Path]) -> list[str]:
    return [str(drafts.get(word, word)) for word in arguments]


@pytest.fixture
def options(monkeypatch) -> None:
    for option in vars(DFlashOptions).values():
        if isinstance(option, Option):
            monkeypatch.setenv(option.variable, "")  # restored afterwards, whatever a flag sets


def decision_of(arguments: list[str], monkeypatch) -> tuple[str, tuple[str, ...], int | None]:
    """Return who serves, why ours does not, and the block size, by our step of the pipeline alone."""
    algorithm.register()
    parser = ArgumentParser()
    ServerArgs.add_cli_args(parser)
    if "--speculative-copy-ahead" not in parser.format_help():
        add_flags(parser)
    given = ["--device", "cuda", "--attention-backend", "fa3", "--page-size", "1"]
    record = ServerArgs.from_cli_args(parser.parse_args([*given, *arguments]))
    # As an earlier step has it.
    record._speculative_draft_quantization_explicitly_set = bool(record.speculative_draft_model_quantization)
    monkeypatch.setattr(patching, "install", lambda table: None)  # of the front end, for this process
    try:
        entry_points.resolve_speculative_decoding(record, speculative_hook.handle_speculative_decoding)
    except ValueError as error:
        return REFUSED, (str(error),), None
    decision = Implementation.from_server_args(record)
    by = BUILT_IN if decision.is_builtin else OURS
    return by, decision.because, resolving_view(record).speculative_num_draft_tokens


def test_variables_before_the_command():
    """They may leave the plugin out, and then the built-in serves."""
    command = "SGLANG_PLUGINS=none", "python", "-m", "sglang.launch_server", *PAIR
    status, answer = examine(*command, device="cuda")
    assert (status, answer["served_by"]) == (STATUS[BUILT_IN], BUILT_IN)
    assert answer["because"] == [NOT_LOADED] and answer["lost"] != []


@pytest.mark.parametrize("name", ON_A_GPU)
def test_who_serves_on_a_gpu(name, answers, drafts, options, monkeypatch):
    arguments, by, words = ON_A_GPU[name]
    answer = answers[name]
    decided, because, block_size = decision_of([*PAIR, *with_draft(arguments, drafts)], monkeypatch)
    assert answer["served_by"] == decided == by, answer
    assert tuple(answer["because"]) == because and words in " ".join(because)
    assert answer["settings"].get("block size") == block_size
    assert bool(answer["lost"]) == (by == BUILT_IN)


def test_what_is_on_a_gpu(answers):
    plain, rich = (answers[name]["settings"] for name in ("the defaults", "copies and own lengths"))
    assert (plain["adaptive width"], plain["copies"]) == (False, False)
    assert (rich["adaptive width"], rich["copies"]) == ("1, 4, 8", True)
    assert plain["CUDA graphs of decode"] and plain["attention of the draft"] == "fa3"
    assert "off by default on a GPU" in " ".join(answers["the defaults"]["log"])


def kv_bytes(config: dict) -> int:
    """Return bytes of a token's keys and values in bfloat16, of all layers with attention."""
    config = config.get("text_config", config)
    layers = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    count = sum("attention" in kind and kind != "linear_attention" for kind in layers)
    return count * 2 * 2 * config["num_key_value_heads"] * config["head_dim"]


def state_bytes(config: dict) -> int:
    """Return bytes of a request's float32 states and bfloat16 inputs of convolutions."""
    config = config.get("text_config", config)
    key, value = (
        config[f"linear_num_{name}_heads"] * config[f"linear_{name}_head_dim"] for name in ("key", "value")
    )
    inputs = (2 * key + value) * (config["linear_conv_kernel_dim"] - 1)
    state = value * config["linear_key_head_dim"]
    return config["layer_types"].count("linear_attention") * (4 * state + 2 * inputs)


@pytest.mark.parametrize(
    "name, target, draft",
    [
        ("the defaults", TARGET, DRAFT),
        ("a quantized draft", TARGET, DRAFT),
        ("recurrent states", HYBRID_TARGET, HYBRID_DRAFT),
    ],
)
def test_the_memory_on_a_gpu(name, target, draft, answers):
    """A quantized draft takes as much as it did before: it is dequantized."""
    memory = answers[name]["memory"]
    of_target, of_draft = (kv_bytes(read_config(checkpoint)) / 1024 for checkpoint in (target, draft))
    assert memory["KV of a token, KiB"] == of_target + of_draft
    assert memory["the draft's part of it, KiB"] == of_draft
    for model, checkpoint in (("target", target), ("draft", draft)):
        stored = (checkpoint / "model.safetensors").stat().st_size / 2**30
        assert memory[f"{model}'s weights, GiB"] == pytest.approx(stored, rel=0.02)
    states = state_bytes(read_config(target)) / 2**20 if target is HYBRID_TARGET else None
    assert memory.get("states of a request, MiB") == states


# --- on this machine ---


def test_a_server_of_ours_is_as_announced():
    arguments = [*PAIR, "--max-total-tokens", "16384", "--no-speculative-adaptive"]
    status, answer = examine(*arguments)
    with serve(*arguments, env=ENVIRONMENT, start=warm_start()) as server:
        info = server.get("/server_info")
    [state] = info["internal_states"]
    assert status == STATUS[OURS] == 0 and answer["served_by"] == OURS
    assert state["speculative_implementation"]["name"] == "sglang-dflash"
    assert answer["settings"]["block size"] == info["speculative_num_draft_tokens"]
    assert answer["settings"]["attention of the target"] == info["attention_backend"]
    assert answer["settings"]["adaptive width"] is False and "speculative_width" not in state
    of_target = answer["memory"]["KV of a token, KiB"] - answer["memory"]["the draft's part of it, KiB"]
    assert state["memory_usage"]["kvcache"] == pytest.approx(16384 * of_target / 2**20, abs=6e-4)


def test_a_speculators_checkpoint_is_ours_on_a_cpu():
    status, answer = examine("--model-path", str(SPECULATORS_DRAFT))
    assert (status, answer["served_by"]) == (0, OURS)
    assert answer["settings"]["adaptive width"] == "1, 4, 8"


@pytest.mark.parametrize("name, words", [("gemma", "Gemma's RMSNorm"), ("hidden size", "hidden_size is 512")])
def test_a_server_that_ends_is_announced(name, words, drafts, tmp_path):
    """The reason is what the start of that server prints."""
    draft = (
        drafts["GEMMA"] if name == "gemma" else make_draft(tmp_path / "draft", base=DRAFT, hidden_size=512)
    )
    arguments = ["--model-path", str(TARGET), *dflash_arguments(draft)]
    status, answer = examine(*arguments)
    assert status == STATUS[REFUSED] == 2 and answer["served_by"] == REFUSED
    [because] = answer["because"]
    started = run_to_end("-m", "sglang.launch_server", *arguments)
    assert words in because and started.code != 0 and because in started.output


def test_a_server_without_dflash_is_no_question():
    command = f"python -m sglang.launch_server \\\n    --model-path {TARGET} \\\n    --dtype float32"
    done = run_to_end("-m", "sglang_dflash.doctor", "--serve", command, timeout=900)
    assert done.code == 2 and "doctor: --serve: DFLASH is not requested" in done.output
