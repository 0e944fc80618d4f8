"""Bad starts: each ends by itself, not with exit code 0, and says what is wrong in words a user can act on.

SGLang refuses most of them while it reads its arguments. Those run the real entry point, each in a fork of a process
that has SGLang imported, as the import is nearly all the time such a start takes. The rest need a scheduler.
"""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import ENVIRONMENT
from drafts import REMOVE, make_draft, read_config
from serving import DRAFT, PEAGLE_DRAFT, ROOT, TARGET, ServerDied, dflash_arguments, serve

pytestmark = pytest.mark.server

MODEL = ["--model-path", str(TARGET)]
LAYERS = read_config(TARGET)["num_hidden_layers"]
VOCAB = read_config(TARGET)["vocab_size"]

FORKS = """
import json, os, runpy, sys, time, traceback
import sglang.launch_server, sglang.srt.server_args, sglang.srt.arg_groups.pipeline, sglang.srt.configs.model_config
import sglang.srt.utils.hf_transformers_utils
for number, arguments in enumerate(json.load(open(sys.argv[1]))):
    child = os.fork()
    if child == 0:
        out = os.open(f"{sys.argv[2]}/{number}", os.O_CREAT | os.O_WRONLY)
        os.dup2(out, 1), os.dup2(out, 2)
        sys.argv = ["sglang.launch_server", *arguments]
        try:
            runpy.run_module("sglang.launch_server", run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
            print(end)
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)  # tearing an interpreter down that has PyTorch in it takes seconds
    for _ in range(600):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        time.sleep(0.1)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        status = 0  # it did not end by itself: as bad as ending well
    print(os.waitstatus_to_exitcode(status), flush=True)
"""

# name -> (changes to the draft's config, what the message must contain)
BAD_DRAFTS: dict[str, tuple[dict, tuple[str, ...]]] = {
    "no mask token": ({"dflash_config": {"mask_token_id": REMOVE}}, ("mask_token_id", "missing")),
    "no block size": ({"block_size": REMOVE}, ("block_size", "missing")),
    "two faults": (
        {"block_size": REMOVE, "dflash_config": {"mask_token_id": REMOVE}},
        ("block_size", "mask_token_id"),
    ),
    "mask token outside the vocabulary": ({"dflash_config": {"mask_token_id": VOCAB}}, ("mask_token_id", str(VOCAB))),
    "negative mask token": ({"dflash_config": {"mask_token_id": -1}}, ("mask_token_id", "-1")),
    "block size zero": ({"block_size": 0}, ("block_size", "0")),
    "hidden size": ({"hidden_size": 128}, ("hidden_size", "128", "256")),
    "vocabulary": ({"vocab_size": VOCAB * 2}, ("vocab_size", str(VOCAB * 2), str(VOCAB))),
    "depth of the target": ({"num_target_layers": 36}, ("num_target_layers", "36", str(LAYERS))),
    "layer id out of range": ({"dflash_config": {"target_layer_ids": [1, 99]}}, ("target_layer_ids", "99")),
    "id of the last layer": ({"dflash_config": {"target_layer_ids": [1, LAYERS - 1]}}, ("target_layer_ids", "last")),
    "layer ids repeated": ({"dflash_config": {"target_layer_ids": [1, 4, 4, 7]}}, ("target_layer_ids",)),
    "layer ids descending": ({"dflash_config": {"target_layer_ids": [7, 4, 1]}}, ("target_layer_ids",)),
    "layer ids empty": ({"dflash_config": {"target_layer_ids": []}}, ("target_layer_ids",)),
    "another kind of draft": ({"architectures": ["LlamaForCausalLMEagle3"]}, ("DFlash", "LlamaForCausalLMEagle3")),
    "unknown layer type": ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, ("linear",)),
}

# name -> (flags beside a good pair, what the message must contain)
BAD_FLAGS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "pipeline parallelism": (["--pp-size", "2"], ("pipeline parallelism", "--pp-size")),
    "DP attention": (["--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"], ("DP attention",)),
    "two-batch overlap": (["--enable-two-batch-overlap"], ("two-batch overlap",)),
    "hierarchical cache": (["--enable-hierarchical-cache"], ("hierarchical",)),
    "a grammar backend that cannot roll back": (["--grammar-backend", "outlines"], ("--grammar-backend", "xgrammar")),
    "disaggregation": (["--disaggregation-mode", "decode"], ("disaggregation",)),
    "a tree": (["--speculative-eagle-topk", "4"], ("--speculative-eagle-topk",)),
    "several steps": (["--speculative-num-steps", "3"], ("--speculative-num-steps",)),
    "no draft window": (["--speculative-draft-window-size", "0"], ("--speculative-draft-window-size", "0")),
    "draft sample method": (["--speculative-draft-sample-method", "gumbel"], ("greedy", "probabilistic")),
    "token map": (["--speculative-token-map", "map.pt"], ("--speculative-token-map",)),
    "LoRA": (["--enable-lora", "--lora-paths", "one=/nowhere", "--max-lora-rank", "8"], ("LoRA",)),
    "block size twice": (
        ["--speculative-num-draft-tokens", "4", "--speculative-dflash-block-size", "8"],
        ("--speculative-num-draft-tokens", "--speculative-dflash-block-size", "4", "8"),
    ),
    "block size zero": (["--speculative-num-draft-tokens", "0"], ("block size", "0")),
}


def other_starts(tmp: Path) -> dict[str, tuple[list[str], tuple[str, ...]]]:
    """name -> (all flags, what the message must contain)"""
    broken = make_draft(tmp / "broken")
    (broken / "config.json").write_text("{not json")
    missing = str(tmp / "no" / "draft" / "here")
    last_layer = make_draft(tmp / "last-layer", base=PEAGLE_DRAFT, eagle_aux_hidden_state_layer_ids=[2, 6, LAYERS])
    peagle = ["--speculative-algorithm", "PEAGLE", "--speculative-draft-model-path"]
    return {
        "no draft given": ([*MODEL, "--speculative-algorithm", "DFLASH"], ("--speculative-draft-model-path",)),
        "draft path missing": (
            [*MODEL, *dflash_arguments(missing)],
            ("--speculative-draft-model-path", missing),
        ),
        # Relative, as in the README's command, and so in the form of a name on the Hugging Face hub.
        "relative draft path missing": (
            [*MODEL, *dflash_arguments("models/no-such-draft")],
            ("--speculative-draft-model-path", "models/no-such-draft"),
        ),
        "PEAGLE with a DFlash draft": ([*MODEL, *peagle, str(DRAFT)], ("no P-EAGLE checkpoint", "DFlashDraftModel")),
        "PEAGLE without a draft": ([*MODEL, "--speculative-algorithm", "PEAGLE"], ("--speculative-draft-model-path",)),
        "P-EAGLE that reads the last layer": ([*MODEL, *peagle, str(last_layer)], ("the last layer", str(last_layer))),
        "draft config is no JSON": ([*MODEL, *dflash_arguments(broken)], (str(broken),)),
        "the target as its own draft": ([*MODEL, *dflash_arguments(TARGET)], ("DFlash", "Qwen3ForCausalLM")),
    }


@pytest.fixture(scope="module")
def starts(tmp_path_factory) -> dict[str, tuple[int, str, tuple[str, ...]]]:
    """name -> (exit code, output, what it must contain), of every start refused while arguments are read."""
    tmp = tmp_path_factory.mktemp("starts")
    all_starts = {
        f"draft: {name}": ([*MODEL, *dflash_arguments(make_draft(tmp / f"draft-{i}", **changes))], words)
        for i, (name, (changes, words)) in enumerate(BAD_DRAFTS.items())
    }
    for name, (flags, words) in BAD_FLAGS.items():
        all_starts[f"flags: {name}"] = ([*MODEL, *dflash_arguments(), *flags], words)
    all_starts.update(other_starts(tmp))
    (tmp / "arguments.json").write_text(json.dumps([arguments for arguments, _ in all_starts.values()]))
    done = subprocess.run(
        [sys.executable, "-c", FORKS, tmp / "arguments.json", tmp],
        capture_output=True,
        text=True,
        timeout=900,
        cwd=ROOT,
    )
    codes = [int(line) for line in done.stdout.split() if line.lstrip("-").isdigit()]
    assert len(codes) == len(all_starts), f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return {
        name: (code, (tmp / str(number)).read_text(), words)
        for number, ((name, (_, words)), code) in enumerate(zip(all_starts.items(), codes))
    }


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
    "the target as its own draft",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_bad_start_ends_with_a_message(name, starts):
    code, output, words = starts[name]
    assert code not in (0, -9), f"exit code {code}; the server started, or hung:\n{output[-3000:]}"
    # The message is the exception's own, at the end: what SGLang echoes of the flags does not count.
    message = output[output.rfind("Error") :] if "Error" in output else output[-1500:]
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in the message:\n{message[-3000:]}"


def _without(name: str):
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def _cut(name: str):
    return lambda tensors: {**tensors, name: tensors[name][:-1].clone()}


def _extra(name: str):
    return lambda tensors: {**tensors, name: torch.zeros(4, 4)}


# name -> (changes to the draft's tensors, changes to its config, what the message must contain)
BAD_WEIGHTS = {
    "a tensor missing": (_without("layers.1.self_attn.o_proj.weight"), {}, "layers.1.self_attn.o_proj.weight"),
    "a part of a fused tensor missing": (_without("layers.1.self_attn.k_proj.weight"), {}, "layers.1.self_attn"),
    "a tensor of another shape": (_cut("hidden_norm.weight"), {}, "hidden_norm.weight"),
    "a tensor too many": (_extra("layers.0.self_attn.sinks"), {}, "layers.0.self_attn.sinks"),
    "fc for another number of layers": (None, {"dflash_config": {"target_layer_ids": [1, 4, 7]}}, "fc.weight"),
}


@pytest.fixture(scope="module")
def weight_errors(tmp_path_factory, servers) -> dict[str, str | None]:
    """name -> how the start failed, or None where it did not. Two at a time."""
    servers.close()
    tmp = tmp_path_factory.mktemp("weights")

    def start(item):
        number, (weights, changes, _) = item
        draft = make_draft(tmp / str(number), weights, base=DRAFT, **changes)
        try:
            with serve(*MODEL, *dflash_arguments(draft), env=ENVIRONMENT):
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
