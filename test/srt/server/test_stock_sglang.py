"""SGLang without DFLASH is unchanged, and every way to start it serves DFLASH."""

import json
import os
import subprocess
import sys
import urllib.error
from pathlib import Path

import pytest
import torch
from serving import DRAFT, ROOT, TARGET, dflash_arguments, heldout_prompts, serve
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor
from support.parity import assert_same
from support.servers import COUNTED, FLOAT32, run_to_end

from sglang_dflash.srt.hardware_backend.cpu import runtime

LOOK = """
import json
import sys
from types import SimpleNamespace

import torch
import sglang.srt.runtime_context as context
# No server has set them yet.
context.get_parallel = lambda: SimpleNamespace(attn_dp_enabled=False)
context.get_lora = lambda: SimpleNamespace(enable_lora=False)
from sglang.srt.plugins import load_plugins
load_plugins()
import sglang.srt.managers.detokenizer_manager as detokenizer_manager
import sglang.srt.managers.scheduler as scheduler
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang_dflash.srt.plugins.algorithm import ServedName

def torch_native(algorithm):
    # The backend that a model runner gets for a model that SGLang's own can run.
    runner = SimpleNamespace(
        device="cpu",
        req_to_token_pool=None,
        token_to_kv_pool=None,
        use_mla_backend=False,
        model=torch.nn.Linear(1, 1),
        spec_algorithm=SpeculativeAlgorithm.from_string(algorithm),
    )
    return type(ATTENTION_BACKENDS["torch_native"](runner)).__module__

def look(algorithm="NGRAM"):
    return {
        "draft model": ModelRegistry.models["DFlashDraftModel"].__module__,
        "torch_native": torch_native(algorithm),
        "request check": scheduler.validate_dflash_request.__module__,
        "streams": detokenizer_manager.DecodeStatus.__module__,
    }

args = SimpleNamespace(
    disable_overlap_schedule=False,
    enable_multi_layer_eagle=False,
    speculative_adaptive=False,
    device="cpu",
    disaggregation_mode="null",
)
workers, seen = {}, {"loaded": look()}
for name in ("NGRAM", "EAGLE3", "DFLASH"):
    algorithm = SpeculativeAlgorithm.from_string(ServedName(name) if name == "DFLASH" else name)
    workers[name] = algorithm.create_worker(args).__module__
    seen[name] = look(name)
print("ANSWER", json.dumps({"workers": workers, "seen": seen}))
"""

UNNAMED = """
import sys
try:
    import sglang
    from sglang.srt.plugins import load_plugins
    load_plugins()
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    what = getattr(SpeculativeAlgorithm.create_worker, "__module__", "")
except Exception as error:  # without a GPU and the plugin SGLang cannot be imported
    what = repr(error)
print("ANSWER", any(name.split(".")[0] == "sglang_dflash" for name in sys.modules), what)
"""


def run(*command: str, **environment: str) -> str:
    """Run Python and return the text that it prints after ANSWER."""
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
    )
    output = done.stdout + done.stderr
    answers = [
        line.removeprefix("ANSWER ") for line in done.stdout.splitlines() if line.startswith("ANSWER ")
    ]
    assert done.returncode == 0 and len(answers) == 1, output[-4000:]
    return answers[0]


@pytest.fixture(scope="module")
def looked() -> dict:
    looked = run_to_end("-c", LOOK)
    [answer] = [line for line in looked.output.splitlines() if line.startswith("ANSWER ")]
    return json.loads(answer.removeprefix("ANSWER "))


def test_loading_the_plugin_replaces_nothing_a_server_without_dflash_runs(looked):
    for moment in ("loaded", "NGRAM", "EAGLE3"):
        foreign = {
            what: module
            for what, module in looked["seen"][moment].items()
            if not module.startswith("sglang.")
        }
        assert not foreign, f"{moment}: {foreign}"


def test_other_algorithms_keep_their_workers(looked):
    assert looked["workers"]["NGRAM"].startswith("sglang.srt.speculative.")
    assert looked["workers"]["EAGLE3"].startswith("sglang.srt.speculative.")


def test_dflash_gets_ours(looked):
    """Control: the same program finds our changes once DFLASH is requested."""
    assert looked["workers"]["DFLASH"].startswith("sglang_dflash.")
    after = looked["seen"]["DFLASH"]
    assert after["draft model"].startswith("sglang_dflash.")
    assert after["request check"].startswith("sglang_dflash.")
    if not torch.cuda.is_available():
        assert after["torch_native"].startswith("sglang_dflash.")


def test_another_name_in_sglang_plugins_turns_us_off():
    """Use SGLang's own switch; on a GPU the built-in DFLASH then serves."""
    loaded, _, what = run("-c", UNNAMED, SGLANG_PLUGINS="something_else").partition(" ")
    assert loaded == "False", f"the plugin was loaded although SGLANG_PLUGINS names another: {what}"
    assert "sglang_dflash" not in what


@pytest.mark.server
def test_the_plain_server_agrees_with_transformers(reference):
    """Compare the reference of all lossless tests, and our CUDA stand-ins, with HF."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    prompts = [p["text"] for p in heldout_prompts()][::20]
    requests = [
        {"text": text, "sampling_params": {"temperature": 0, "max_new_tokens": 24}} for text in prompts
    ]
    for request, answer in zip(requests, reference.answers(requests)):
        prompt, output = tokenizer(request["text"])["input_ids"], answer["output_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        behind = (logits.max(dim=-1).values - chosen).max().item()
        assert behind < 1e-3, (
            f"{request}: a token of the plain server is {behind} behind Hugging Face's best: {output}"
        )


@pytest.mark.server
def test_sglang_serve_runs_our_worker(reference, servers):
    """Run logit processors, and refuse unsupported fields, with SGLang's switches for both on.

    The one server of the normal lane that starts as a user's does: others are forks.
    """
    servers.close()
    flags = ("--enable-return-hidden-states", "--enable-custom-logit-processor")
    requests = _requests()
    with serve(
        *("--model-path", TARGET, *FLOAT32, *dflash_arguments(), *flags),
        env=COUNTED,
        launcher=(str(Path(sys.executable).with_name("sglang")), "serve"),
    ) as server:
        answers = server.generate_many(requests, 4)
        assert_same(requests, answers, reference.answers(requests))
        assert all(answer["meta_info"]["spec_verify_ct"] > 0 for answer in answers)
        log = server.log()
        assert "sglang-dflash DFlashWorker" in log
        if runtime.needs_stand_in():  # spawned children run on it, and keep quiet
            assert log.count("no CUDA driver on this machine") == 1
        first = answers[0]["output_ids"][0]
        sampling = requests[0]["sampling_params"] | {"custom_params": {"token_ids": [first]}}
        processor = DisallowedTokensLogitsProcessor.to_str()
        answer = server.generate(
            **requests[0] | {"sampling_params": sampling, "custom_logit_processor": processor}
        )
        assert first not in answer["output_ids"]
        for name, value in (("return_hidden_states", True), ("custom_logit_processor", '{"callable": "00"}')):
            with pytest.raises(urllib.error.HTTPError) as refusal:
                server.generate(**requests[0], **{name: value})
            message = refusal.value.read().decode()
            assert refusal.value.code == 400 and name in message, f"{name}: {refusal.value.code} {message}"
        assert_same(requests[:1], [server.generate(**requests[0])], reference.answers(requests[:1]))


@pytest.mark.server
def test_the_engine_example_runs_our_worker(reference, servers, tmp_path):
    """Start `sglang.Engine` by the script in examples/, with the default widths."""
    servers.close()
    requests = _requests()
    file = tmp_path / "requests.jsonl"
    file.write_text("".join(json.dumps(request) + "\n" for request in requests))
    example = ROOT / "examples" / "offline_engine.py"
    program = f"import runpy; runpy.run_path({str(example)!r}, run_name='__main__')"
    pair = "--model-path", TARGET, "--draft", DRAFT
    done = run_to_end("-c", program, *pair, "--requests", file, "--dtype", "float32", environment=COUNTED)
    assert done.code == 0, done.output[-4000:]
    answers = [json.loads(line) for line in done.output.splitlines() if line.startswith("{")]
    assert_same(requests, answers, reference.answers(requests))
    assert all(answer["meta_info"]["spec_verify_ct"] > 0 for answer in answers)


def _requests() -> list[dict]:
    texts = [p["text"] for p in heldout_prompts() if 8 <= p["num_tokens"] <= 200][::20]
    sampling = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    return [{"text": text, "sampling_params": sampling} for text in texts]
