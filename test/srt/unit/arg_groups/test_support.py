"""The decision who serves: ours, SGLang's built-in DFLASH, or neither.

Records are resolved by SGLang's own step, as in the launcher, for a pretended GPU. What is compared is the
whole record.
"""

import ast
import inspect
import logging
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import sglang  # noqa: F401  loads our platform plugin before any of SGLang's modules
from serving import DRAFT, SPECULATORS_DRAFT
from sglang.srt.arg_groups import speculative_hook
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from support.drafts import REMOVE, as_deepseek, read_config, write_checkpoint
from support.records import changed_draft, quantize_draft, record_of, resolve
from support.releases import IS_0_5_22

from sglang_dflash.srt.arg_groups import support
from sglang_dflash.srt.arg_groups.implementation import Implementation
from sglang_dflash.srt.arg_groups.support import _FLAGS as FLAGS
from sglang_dflash.srt.arg_groups.support import SPLIT_EMBEDDINGS, flag_of
from sglang_dflash.srt.configs.draft_config_parser import DraftConfigParser
from sglang_dflash.srt.environ import DFlashOptions
from sglang_dflash.srt.plugins.server_info import add_reports, check_ranks_run_ours

ATTRIBUTE = "_dflash_implementation"


def contents(record: ServerArgs) -> dict:
    """Return everything that a record holds, but for our decision."""
    _, (kind, fields, bookkeeping) = record.__reduce__()
    return {**fields, **{name: value for name, value in bookkeeping.items() if name != ATTRIBUTE}}


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "original_max_position_embeddings": 256,
    "short_factor": [1.0] * 32,
    "long_factor": [2.0] * 32,
    "factor": 2.0,
}
DOMINO = {"projector_type": "domino", "shift_label": True, "pure_draft_prefix_len": 1}
DOMINO |= {"gru_hidden_dim": 8, "emb_dim": 8}
DP = {"attn_dp_size": 2, "tp_size": 2}
DP_WHOLE_HEAD = DP | {"enable_dp_lm_head": True}


# name -> (changes to the bundled draft's config, arguments, text in the reason)
FALLBACKS = {
    **{
        flag_of(field): ({}, {field: 2 if served == 1 else True}, flag_of(field))
        for field, served, _, builtin_supports, _ in FLAGS
        if builtin_supports
    },
    "an NPU": ({}, {"device": "npu"}, "device 'npu'"),
    "an XPU": ({}, {"device": "xpu"}, "device 'xpu'"),
    "a target backend": ({}, {"attention_backend": "flashmla"}, "'flashmla'"),
    "mixed prefill with DP attention": (
        {},
        DP_WHOLE_HEAD | {"enable_mixed_chunk": True},
        "--enable-mixed-chunk with DP attention",
    ),
    "disaggregation with DP attention": (
        {},
        DP_WHOLE_HEAD | {"disaggregation_mode": "decode"},
        "--disaggregation-mode with DP attention",
    ),
    "sinks": ({"dflash_config": {"attention_sink_bias": True}}, {}, "attention sinks"),
    "LiLiCorr": ({"dflash_config": {"lilicorr_hidden_size": 8}}, {}, "LiLiCorr"),
    "Gemma's norm": ({"use_gemma_norm": True}, {}, "Gemma's RMSNorm"),
    "experts": ({"num_experts": 8}, {}, "a mixture of experts"),
    "partial RoPE": ({"partial_rotary_factor": 0.5}, {}, "doctor --measure tries both"),
    "interleaved RoPE": ({"rope_is_neox_style": False}, {}, "interleaved rotary"),
    "another activation": ({"hidden_act": "swigluoai"}, {}, "hidden_act is 'swigluoai'"),
    "another quantization": ({"quantization_config": {"quant_method": "gptq"}}, {}, "quant_method 'gptq'"),
    "a draft to quantize": ({}, quantize_draft("awq"), "--speculative-draft-model-quantization awq"),
    "Domino": ({"dflash_config": DOMINO}, {}, "Domino"),
    "no target layers": (
        {"dflash_config": {"target_layer_ids": REMOVE}, "num_target_layers": REMOVE},
        {},
        "target_layer_ids is missing",
    ),
    "another RoPE": ({"rope_parameters": LONGROPE}, {}, "is of kind 'longrope'"),
    "RoPE by layer type": (
        {"rope_parameters": {"full_attention": {"rope_theta": 10000.0}}},
        {},
        "by layer type",
    ),
    "Laguna": ({"architectures": ["DFlashLagunaForCausalLM"]}, {}, "DFlashLagunaForCausalLM"),
    "Muse": ({"architectures": ["MuseGlimmerAssistantModel"]}, {}, "MuseGlimmerAssistantModel"),
}


# On CPUs ours refuses these by name. In no process may the reading of a config be what ends the start.
UNREADABLE = [name for name, (changes, _, _) in FALLBACKS.items() if changes]


@pytest.mark.parametrize("name", UNREADABLE)
def test_the_parser_judges_no_draft_that_falls_back(name, tmp_path):
    draft = changed_draft(FALLBACKS[name][0], tmp_path)
    config = DraftConfigParser().parse(str(draft), trust_remote_code=False)
    assert config.architectures


BUILTIN_LACKS_DP = IS_0_5_22  # its DFLASH refuses DP attention
NEED_DP = [name for name in FALLBACKS if "DP attention" in name] if BUILTIN_LACKS_DP else []
NEW_FLAGS = ["--enable-nvidia-megakernel", "--enable-amd-monokernel"] if IS_0_5_22 else []


@pytest.mark.parametrize("name", [name for name in FALLBACKS if name not in NEED_DP + NEW_FLAGS])
def test_the_record_of_a_fallback_is_the_one_of_plain_sglang(name, tmp_path, caplog):
    changes, arguments, words = FALLBACKS[name]
    draft = changed_draft(changes, tmp_path)
    stock = record_of(draft, **arguments)
    speculative_hook.handle_speculative_decoding(stock)
    with caplog.at_level(logging.WARNING, "sglang_dflash"):
        ours = resolve(record_of(draft, **arguments))
    decision = Implementation.from_server_args(ours)
    assert decision.is_builtin and any(words in reason for reason in decision.because), decision
    assert contents(ours) == contents(stock)
    [warning] = [record for record in caplog.records if record.name.startswith("sglang_dflash")]
    for text in (words, "built-in implementation serves", "Lost: adaptive width", "SGLANG_DFLASH_STRICT=1"):
        assert text in warning.getMessage()


@pytest.mark.parametrize("name", ["--attn-cp-size", "Domino"])
def test_strict_refuses_instead(name, tmp_path, monkeypatch):
    changes, arguments, words = FALLBACKS[name]
    monkeypatch.setenv(DFlashOptions.STRICT.variable, "1")
    with pytest.raises(ValueError, match="--speculative-dflash-strict forbids it") as refused:
        resolve(record_of(changed_draft(changes, tmp_path), **arguments))
    assert words in str(refused.value)


def test_http_workers_without_an_interface_fall_back(monkeypatch):
    """SGLang 0.5.22 names no application for its HTTP workers, which load no plugin."""
    from sglang.srt.environ import Envs

    record = record_of(DRAFT, tokenizer_worker_num=2)
    assert IS_0_5_22 or not support.flag_problems(record)
    monkeypatch.delattr(Envs, "SGLANG_HTTP_SERVER_APP_PATH", raising=False)
    assert [finding.builtin_supports for finding in support.flag_problems(record)] == [True]


@pytest.mark.parametrize(
    "option, value, flag",
    [
        (DFlashOptions.COPY_AHEAD, "1", "--speculative-copy-ahead"),
        (DFlashOptions.WAIT_UNDER_DRAFT, "1", "SGLANG_DFLASH_WAIT_UNDER_DRAFT"),
        (DFlashOptions.DRAFT_SAMPLE_METHOD, "probabilistic", "--speculative-draft-sample-method"),
    ],
)
def test_what_only_ours_has_is_not_dropped_silently(option, value, flag, monkeypatch):
    monkeypatch.setenv(option.variable, value)
    with pytest.raises(ValueError, match="(?s)--attn-cp-size.*it lacks .*which was requested") as refused:
        resolve(record_of(attn_cp_size=2))
    assert flag in str(refused.value)


@pytest.mark.parametrize("written_by", ["speculators", "DeepSeek"])
def test_a_draft_that_the_built_in_cannot_read_does_not_fall_back(written_by, tmp_path):
    draft = SPECULATORS_DRAFT
    if written_by == "DeepSeek":
        draft = write_checkpoint(tmp_path / "draft", as_deepseek(read_config(DRAFT)), {})
    with pytest.raises(ValueError, match="(?s)--attn-cp-size.*a reader of this draft's format"):
        resolve(record_of(draft, attn_cp_size=2))


# name -> (changes to the draft's config, arguments, words of the refusal)
REFUSED_BY_BOTH = {
    "pipeline parallelism": ({}, {"pp_size": 2}, "--pp-size"),
    "DP attention without a whole head": ({}, DP, "--enable-dp-lm-head"),
    "heads that cannot be split": ({}, {"tp_size": 3}, "cannot be split over --tp 3"),
    "a CPU": (
        {"use_gemma_norm": True},
        {"device": "cpu", "attention_backend": "torch_native"},
        "Gemma's RMSNorm",
    ),
}


@pytest.mark.parametrize("name", REFUSED_BY_BOTH)
def test_what_the_built_in_lacks_too_is_refused(name, tmp_path):
    changes, arguments, words = REFUSED_BY_BOTH[name]
    with pytest.raises(
        ValueError, match="(?s)DFLASH does not support.*does not support this on .* either"
    ) as refused:
        resolve(record_of(changed_draft(changes, tmp_path), **arguments))
    assert words in str(refused.value)


def test_layers_that_are_no_object_end_no_start_in_a_traceback(tmp_path):
    with pytest.raises(ValueError, match="cannot be served:"):
        resolve(record_of(changed_draft({"transformer_layer_config": [1]}, tmp_path)))


# name -> (changes to the draft's config, arguments, words of our warning, words of the built-in)
HANDED_OVER = {
    "context and DP attention": (
        {},
        {"attn_cp_size": 2, "attn_dp_size": 2, "tp_size": 4, "enable_dp_lm_head": True},
        "--attn-cp-size",
        "does not support dp attention" if BUILTIN_LACKS_DP else "does not support context parallel",
    ),
}
HANDED_OVER |= {name: (*FALLBACKS[name], "does not support dp attention") for name in NEED_DP}


@pytest.mark.parametrize("name", HANDED_OVER)
def test_the_built_in_refuses_in_its_own_words(name, tmp_path, caplog):
    changes, arguments, ours, theirs = HANDED_OVER[name]
    record = record_of(changed_draft(changes, tmp_path), **arguments)
    with pytest.raises(ValueError, match=theirs), caplog.at_level(logging.WARNING, "sglang_dflash"):
        resolve(record)
    assert ours in caplog.text


def test_children_learn_the_decision():
    record = pickle.loads(pickle.dumps(resolve(record_of(attn_cp_size=2))))
    decision = Implementation.from_server_args(record)
    assert decision.name == "sglang" and "--attn-cp-size" in decision.because[0] and decision.lost
    assert Implementation.from_server_args(record_of()).name == "sglang-dflash"


def test_the_next_server_of_a_process_is_no_fallback():
    resolve(record_of(attn_cp_size=2))
    assert DFlashOptions.FALLBACK.get()
    resolve(record_of())
    assert not DFlashOptions.FALLBACK.get()


def test_a_rank_that_runs_another_implementation_ends_the_start(monkeypatch):
    """It never arrives at the barrier, which names it."""
    group = SimpleNamespace(world_size=2, cpu_group="ranks on the CPU")

    def monitored_barrier(group, timeout, wait_all_ranks):
        assert group == "ranks on the CPU" and wait_all_ranks
        raise RuntimeError("Ranks 1 failed to pass monitoredBarrier")

    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.monitored_barrier", monitored_barrier)
    monkeypatch.setattr("sglang.srt.distributed.get_tp_group", lambda: group)
    with pytest.raises(ValueError, match="not all ranks run sglang-dflash.*Ranks 1.*same draft, flags"):
        check_ranks_run_ours()
    group.world_size = 1
    check_ranks_run_ours()


@pytest.mark.parametrize("arguments, name", [({}, "sglang-dflash"), ({"attn_cp_size": 2}, "sglang")])
def test_server_info_says_who_serves(arguments, name):
    scheduler = SimpleNamespace(
        spec_algorithm=SpeculativeAlgorithm.NONE,
        server_args=resolve(record_of(**arguments)),
        draft_worker=SimpleNamespace(reports={}),
    )
    state: dict = {}
    add_reports(lambda *_: None, SimpleNamespace(scheduler=scheduler), state)
    assert state["speculative_implementation"]["name"] == name


def test_targets_whose_embedding_is_split_are_known_in_the_launcher():
    """By SGLang's sources: models with capture whose embedding does not follow the ranks of DP."""
    models = Path(inspect.getfile(ServerArgs)).parent / "models"
    found = set()
    for path in models.glob("*.py"):
        tree = ast.parse(path.read_text())
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        splits = any(
            getattr(call.func, "id", "") == "VocabParallelEmbedding"
            and not {keyword.arg for keyword in call.keywords} & {"use_attn_tp_group", "enable_tp", None}
            for call in calls
        )
        captures = {"set_dflash_layers_to_capture", "set_eagle3_layers_to_capture"}
        entries = [
            node.value
            for node in tree.body
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "EntryClass"
        ]
        if splits and captures & {getattr(node, "name", "") for node in ast.walk(tree)}:
            found |= {node.id for entry in entries for node in ast.walk(entry) if isinstance(node, ast.Name)}
    assert {"LlamaForCausalLM", "Lfm2ForCausalLM"} <= found
    assert {name for name in found if name.endswith(("CausalLM", "Generation"))} <= set(SPLIT_EMBEDDINGS), (
        found
    )
