"""Bad starts: each ends with a non-zero exit code and names the mistake.

SGLang refuses most of them while it reads its arguments. These run the real entry point, each in a fork of a
process that has imported SGLang; with -m long a few also run as a user's command. The others need a
scheduler.
"""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from serving import DRAFT, PEAGLE_DRAFT, ROOT, TARGET, ServerDied, dflash_arguments, serve
from support.drafts import REMOVE, make_draft, read_config
from support.servers import ENVIRONMENT, Ended, run_to_end, warm_start
from transformers import Lfm2Config

from sglang_dflash.srt.environ import DFlashOptions
from sglang_dflash.srt.hardware_backend.cpu import runtime

pytestmark = pytest.mark.server

MODEL = ["--model-path", str(TARGET)]
LAYERS = read_config(TARGET)["num_hidden_layers"]
VOCAB = read_config(TARGET)["vocab_size"]

# name -> (changes to the draft's config, words in the message)
BAD_DRAFTS: dict[str, tuple[dict, tuple[str, ...]]] = {
    # Of 2048 tokens all are taken: there is no row for the default.
    "no mask token": ({"dflash_config": {"mask_token_id": REMOVE}}, ("<|MASK|>", "none to spare")),
    "two faults": (
        {"block_size": 0, "dflash_config": {"mask_token_id": -1}},
        ("block_size", "mask_token_id"),
    ),
    "mask token outside the vocabulary": (
        {"dflash_config": {"mask_token_id": VOCAB}},
        ("mask_token_id", str(VOCAB)),
    ),
    "negative mask token": ({"dflash_config": {"mask_token_id": -1}}, ("mask_token_id", "-1")),
    "block size zero": ({"block_size": 0}, ("block_size", "0")),
    "hidden size": ({"hidden_size": 128}, ("hidden_size", "128", "256")),
    "a missing field": ({"hidden_size": REMOVE}, ("hidden_size is missing",)),
    "layer id out of range": ({"dflash_config": {"target_layer_ids": [1, 99]}}, ("target_layer_ids", "99")),
    "id of the last layer": (
        {"dflash_config": {"target_layer_ids": [1, LAYERS - 1]}},
        ("target_layer_ids", "last"),
    ),
    "layer ids repeated": ({"dflash_config": {"target_layer_ids": [1, 4, 4, 7]}}, ("target_layer_ids",)),
    "fewer layers than fc reads": ({"dflash_config": {"target_layer_ids": [7, 4, 1]}}, ("fc.weight",)),
    "layer ids empty": ({"dflash_config": {"target_layer_ids": []}}, ("target_layer_ids",)),
    "another kind of draft": (
        {"architectures": ["LlamaForCausalLMEagle3"]},
        ("DFlash", "LlamaForCausalLMEagle3"),
    ),
    "a Domino draft": (
        {"dflash_config": {"projector_type": "domino"}},
        ("dflash_config.projector_type", "domino"),
    ),
    "unknown layer type": (
        {"layer_types": ["full_attention", "linear_attention", "full_attention"]},
        ("linear",),
    ),
}

TOO_WIDE = str(ROOT / "test" / "srt" / "golden" / "adaptive-too-wide.json")

DP_ATTENTION = ["--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"]

# name -> (flags beside a good pair, words in the message)
BAD_FLAGS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "pipeline parallelism": (["--pp-size", "2"], ("pipeline parallelism", "--pp-size")),
    "DP attention alone": (DP_ATTENTION, ("DP attention", "needs --enable-dp-lm-head")),
    "two-batch overlap": (["--enable-two-batch-overlap"], ("two-batch overlap",)),
    "no draft window": (["--speculative-draft-window-size", "0"], ("--speculative-draft-window-size", "0")),
    "draft sample method": (["--speculative-draft-sample-method", "gumbel"], ("greedy", "probabilistic")),
    "block size twice": (
        ["--speculative-num-draft-tokens", "4", "--speculative-dflash-block-size", "8"],
        ("--speculative-num-draft-tokens", "--speculative-dflash-block-size", "4", "8"),
    ),
    "block size zero": (["--speculative-num-draft-tokens", "0"], ("block size", "0")),
    "adaptive widths without adaptive": (
        ["--no-speculative-adaptive", "--speculative-adaptive-config", "widths.json"],
        ("--speculative-adaptive-config", "--no-speculative-adaptive"),
    ),
    "adaptive without its config file": (
        ["--speculative-adaptive", "--speculative-adaptive-config", "/no/widths.json"],
        ("--speculative-adaptive-config", "/no/widths.json", "cannot be read"),
    ),
    "adaptive widths beyond the block": (
        ["--speculative-adaptive", "--speculative-adaptive-config", TOO_WIDE],
        ("--speculative-adaptive", "9", "block of 8"),
    ),
}


def other_starts(tmp: Path) -> dict[str, tuple[list[str], tuple[str, ...]]]:
    """Map each name to (all flags, words in the message)."""
    broken = make_draft(tmp / "broken")
    (broken / "config.json").write_text("{not json")
    missing = str(tmp / "no" / "draft" / "here")
    last_layer = make_draft(
        tmp / "last-layer", base=PEAGLE_DRAFT, eagle_aux_hidden_state_layer_ids=[2, 6, LAYERS]
    )
    gemma3, granite = (tmp / name for name in ("gemma3", "granite"))
    for folder, config in (
        (gemma3, {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}),
        (granite, {"architectures": ["GraniteForCausalLM"], "model_type": "granite"}),
    ):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    peagle = ["--speculative-algorithm", "PEAGLE", "--speculative-draft-model-path"]
    return {
        "no draft given": (
            [*MODEL, "--speculative-algorithm", "DFLASH"],
            ("--speculative-draft-model-path",),
        ),
        "draft path missing": (
            [*MODEL, *dflash_arguments(missing)],
            ("--speculative-draft-model-path", missing),
        ),
        # Relative, as in the README's command: it looks like a name on the Hugging Face hub.
        "relative draft path missing": (
            [*MODEL, *dflash_arguments("models/no-such-draft")],
            ("--speculative-draft-model-path", "models/no-such-draft"),
        ),
        "PEAGLE with a DFlash draft": (
            [*MODEL, *peagle, str(DRAFT)],
            ("no P-EAGLE checkpoint", "DFlashDraftModel"),
        ),
        "PEAGLE without a draft": (
            [*MODEL, "--speculative-algorithm", "PEAGLE"],
            ("--speculative-draft-model-path",),
        ),
        "P-EAGLE that reads the last layer": (
            [*MODEL, *peagle, str(last_layer)],
            ("the last layer", str(last_layer)),
        ),
        "draft config is no JSON": ([*MODEL, *dflash_arguments(broken)], (str(broken),)),
        # Without weights: both end before weights would be loaded.
        "a target whose capture is wrong": (
            ["--model-path", str(gemma3), *dflash_arguments()],
            ("Gemma3ForCausalLM", "without the residual"),
        ),
        "a target without capture": (
            ["--model-path", str(granite), *dflash_arguments()],
            ("GraniteForCausalLM", "captures none"),
        ),
        "the target as its own draft": ([*MODEL, *dflash_arguments(TARGET)], ("DFlash", "Qwen3ForCausalLM")),
    }


@dataclass(frozen=True)
class Refused:
    ended: Ended
    words: tuple[str, ...]

    @property
    def message(self) -> str:
        """Message of the last exception, without the flags that SGLang echoes."""
        output = self.ended.output
        return output[output.rfind("Error") :] if "Error" in output else output[-1500:]


@pytest.fixture(scope="module")
def commands(tmp_path_factory) -> dict[str, tuple[list[str], tuple[str, ...]]]:
    """Map names of starts that the argument parser refuses to (arguments, words)."""
    tmp = tmp_path_factory.mktemp("starts")
    commands = {
        f"draft: {name}": ([*MODEL, *dflash_arguments(make_draft(tmp / f"draft-{i}", **changes))], words)
        for i, (name, (changes, words)) in enumerate(BAD_DRAFTS.items())
    }
    for name, (flags, words) in BAD_FLAGS.items():
        commands[f"flags: {name}"] = ([*MODEL, *dflash_arguments(), *flags], words)
    return commands | other_starts(tmp)


def launch(
    arguments: Sequence[str], is_cold: bool = False, environment: dict[str, str] | None = None
) -> Ended:
    command = "-m", "sglang.launch_server", *arguments
    return run_to_end(*command, environment=environment, is_cold=is_cold, timeout=120)


NAMES = [
    *(f"draft: {name}" for name in BAD_DRAFTS),
    *(f"flags: {name}" for name in BAD_FLAGS),
    "no draft given",
    "draft path missing",
    "relative draft path missing",
    "PEAGLE with a DFlash draft",
    "PEAGLE without a draft",
    "P-EAGLE that reads the last layer",
    "draft config is no JSON",
    "a target whose capture is wrong",
    "a target without capture",
    "the target as its own draft",
]


# unit/configs/test_draft_config.py has the messages of the other drafts. unit/arg_groups/ has those of flags:
# test_fallback.py, and test_options.py for the sample method.
DRAFTS_IN_EVERY_RUN = {
    "draft: two faults",
    "draft: hidden size",
    "draft: layer id out of range",
    "draft: fewer layers than fc reads",
    "draft: another kind of draft",
}
LONG_FLAGS = {"flags: DP attention alone", "flags: two-batch overlap", "flags: draft sample method"}


def case(name: str):
    is_long = name in LONG_FLAGS or name.startswith("draft: ") and name not in DRAFTS_IN_EVERY_RUN
    return pytest.param(name, marks=[pytest.mark.long] * is_long)


@pytest.mark.parametrize("name", map(case, NAMES))
def test_a_bad_start_ends_with_a_message(name, commands):
    arguments, words = commands[name]
    refused = Refused(launch(arguments), words)
    assert refused.ended.code not in (0, -9), f"the server started, or hung:\n{refused.ended.output[-3000:]}"
    missing = [word for word in words if word not in refused.message]
    assert not missing, f"{missing} not in the message:\n{refused.message[-3000:]}"
    assert "Traceback" not in refused.ended.output


def test_two_simulations_of_acceptance_end_the_start():
    both = {"SGLANG_SIMULATE_ACC_LEN": "3.5", DFlashOptions.SIMULATE_ACC_LENS.variable: "4,2"}
    ended = launch([*MODEL, *dflash_arguments()], environment=both)
    assert ended.code not in (0, -9), f"the server started, or hung:\n{ended.output[-3000:]}"
    assert all(f"{name} " in ended.output.split("Error: ")[-1] for name in both)
    assert "Traceback" not in ended.output


@pytest.mark.skipif(not runtime.needs_stand_in(), reason="CUDA serves them")
@pytest.mark.parametrize("draft", [(), dflash_arguments()], ids=["no draft", "dflash"])
@pytest.mark.parametrize(
    ("target", "flags", "word"),
    [
        (TARGET, ("--disaggregation-mode", "decode"), "--disaggregation-mode"),
        (TARGET, ("--enable-hierarchical-cache",), "--enable-hierarchical-cache"),
        (Lfm2Config(architectures=["Lfm2ForCausalLM"], num_hidden_layers=4), (), "Lfm2ForCausalLM"),
    ],
    ids=["disaggregation", "hierarchical cache", "LFM2"],
)
def test_what_needs_a_gpu_is_refused_on_a_cpu(target, flags, word, draft, tmp_path):
    if target != TARGET:
        target.save_pretrained(tmp_path)
        target = tmp_path
    ended = launch(["--model-path", str(target), *draft, *flags])
    assert ended.code not in (0, -9), f"the server started, or hung:\n{ended.output[-3000:]}"
    assert "Error: Not served on a CPU: " in ended.output and word in ended.output.split("Error: ")[-1]
    assert "Traceback" not in ended.output


@pytest.mark.long
@pytest.mark.parametrize("name", ["draft: two faults", "relative draft path missing"])
def test_a_command_line_ends_as_its_fork_does(name, commands):
    """Compare a fork, as used above, with the command that a user types."""
    arguments, words = commands[name]
    cold, warm = (Refused(launch(arguments, is_cold), words) for is_cold in (True, False))
    assert cold.ended.code == warm.ended.code != 0
    assert cold.message == warm.message and words[0] in cold.message


def _without(name: str):
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def _cut(name: str):
    return lambda tensors: {**tensors, name: tensors[name][:-1].clone()}


def _extra(name: str, *shape: int):
    return lambda tensors: {**tensors, name: torch.zeros(shape)}


# name -> (changes to the draft's tensors, changes to its config, text in the message)
BAD_WEIGHTS = {
    "a tensor missing": (
        _without("layers.1.self_attn.o_proj.weight"),
        {},
        "layers.1.self_attn.o_proj.weight",
    ),
    "a part of a fused tensor missing": (
        _without("layers.1.self_attn.k_proj.weight"),
        {},
        "layers.1.self_attn",
    ),
    "a tensor of another shape": (_cut("hidden_norm.weight"), {}, "hidden_norm.weight"),
    "a head of another vocabulary": (
        _extra("lm_head.weight", 2 * VOCAB, 256),
        {"vocab_size": 2 * VOCAB},
        "the draft's own head",
    ),
    "fc for another number of layers": (
        None,
        {"dflash_config": {"target_layer_ids": [1, 4, 7]}},
        "fc.weight",
    ),
}


@pytest.fixture(scope="module")
def weight_errors(tmp_path_factory, servers) -> dict[str, str | None]:
    """Map each name to the error of its start, or None if the server started."""
    servers.close()
    tmp = tmp_path_factory.mktemp("weights")

    def start(item):
        number, (weights, changes, _) = item
        draft = make_draft(tmp / str(number), weights, base=DRAFT, **changes)
        try:
            with serve(*MODEL, *dflash_arguments(draft), env=ENVIRONMENT, start=warm_start()):
                return None
        except ServerDied as died:
            return str(died)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(BAD_WEIGHTS, pool.map(start, enumerate(BAD_WEIGHTS.values()))))


@pytest.mark.parametrize("name", BAD_WEIGHTS)
def test_weights_that_do_not_fit_the_config_end_the_start(name, weight_errors):
    failure = weight_errors[name]
    assert failure is not None, "the server started on a draft whose weights are not its config's"
    assert "exit code 0" not in failure
    assert BAD_WEIGHTS[name][2] in failure, failure
