"""The decision who serves: ours, SGLang's built-in DFLASH, or none.

Records are resolved by SGLang's own step, as in the launcher, for a pretended GPU. What is compared is the
whole record.
"""

import ast
import copy
import inspect
import logging
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import sglang  # loads our platform plugin before any of SGLang's modules
from serving import DRAFT, HYBRID_DRAFT, HYBRID_TARGET, ROOT, SPECULATORS_DRAFT, TARGET
from sglang.srt.arg_groups import speculative_hook
from sglang.srt.arg_groups.model_override_base import resolved_view, resolving_view
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from support.drafts import REMOVE, make_draft

from sglang_dflash.srt.arg_groups import support
from sglang_dflash.srt.arg_groups.fallback import builtin_refusal
from sglang_dflash.srt.arg_groups.support import SPLIT_EMBEDDINGS
from sglang_dflash.srt.configs.draft_config_parser import DraftConfigParser
from sglang_dflash.srt.environ import DFlashOptions, Option
from sglang_dflash.srt.observability.server_info import (
    Implementation,
    adding_reports,
    check_ranks_run_ours,
)
from sglang_dflash.srt.plugins import algorithm, entry_points, patch, patches
from sglang_dflash.srt.speculative.width.settings import AdaptiveSettings

ATTRIBUTE = "_dflash_implementation"


@pytest.fixture(autouse=True)
def options(monkeypatch) -> None:
    for option in vars(DFlashOptions).values():
        if isinstance(option, Option):
            monkeypatch.setenv(option.variable, "")  # restored afterwards, whatever a test sets


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    """Register our algorithm, unless another file's tests have loaded the plugin."""
    algorithm.register()


def changed_draft(changes: dict, tmp_path: Path) -> Path:
    """Return the bundled draft, or a copy with changes to its config."""
    return make_draft(tmp_path / "draft", base=DRAFT, **changes) if changes else DRAFT


def record_of(draft=DRAFT, **arguments) -> ServerArgs:
    """Return a record of a server on a GPU, as SGLang's step of speculative decoding finds it."""
    return ServerArgs(
        **{
            "model_path": str(TARGET),
            "device": "cuda",
            "attention_backend": "fa3",
            "page_size": 1,
            "speculative_algorithm": "DFLASH",
            "speculative_draft_model_path": str(draft),
            "speculative_draft_model_revision": "main",
            **arguments,
        }
    )


def resolve(record: ServerArgs) -> ServerArgs:
    """Resolve a record as the launcher does with the plugin."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(patch, "install", lambda table: None)  # AT_FRONT_END, for this process
        entry_points.resolve_speculative_decoding(record, speculative_hook.handle_speculative_decoding)
    return record


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


def quantize_draft(method: str, is_given: bool = True) -> dict:
    """Return the fields of --speculative-draft-model-quantization, or of the target's if not given."""
    name = "speculative_draft_model_quantization"
    return {name: method, "_speculative_draft_quantization_explicitly_set": is_given}


# name -> (changes to the bundled draft's config, arguments, text in the reason)
FALLBACKS = {
    "context parallelism": ({}, {"attn_cp_size": 2}, "--attn-cp-size"),
    "decode context parallelism": ({}, {"dcp_size": 2}, "--dcp-size"),
    "unified memory": ({}, {"enable_unified_memory": True}, "--enable-unified-memory"),
    "sparse attention": ({}, {"enable_hisparse": True}, "--enable-hisparse"),
    "two-batch overlap": ({}, {"enable_two_batch_overlap": True}, "--enable-two-batch-overlap"),
    "PD multiplexing": ({}, {"enable_pdmux": True}, "--enable-pdmux"),
    "megakernels": ({}, {"enable_nvidia_megakernel": True}, "--enable-nvidia-megakernel"),
    "monokernels": ({}, {"enable_amd_monokernel": True}, "--enable-amd-monokernel"),
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


IS_0_5_22 = sglang.__version__.startswith("0.5.22")
BUILTIN_LACKS_DP = IS_0_5_22  # its DFLASH refuses DP attention
NEED_DP = [name for name in FALLBACKS if "DP attention" in name] if BUILTIN_LACKS_DP else []
NEW_FLAGS = ["megakernels", "monokernels"] if IS_0_5_22 else []


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


@pytest.mark.parametrize("name", ["context parallelism", "Domino"])
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
    assert IS_0_5_22 or not support.flag_findings(record)
    monkeypatch.delattr(Envs, "SGLANG_HTTP_SERVER_APP_PATH", raising=False)
    assert [finding.builtin_supports for finding in support.flag_findings(record)] == [True]


@pytest.mark.parametrize("arguments", [{}, {"enable_lora": True}, {"enable_hierarchical_cache": True}])
def test_ours_serves_whatever_it_can(arguments):
    record = resolve(record_of(**arguments))
    assert not Implementation.from_server_args(record).is_builtin
    assert resolving_view(record).speculative_num_draft_tokens == 8


@pytest.mark.parametrize(
    "option, value, flag",
    [
        (DFlashOptions.COPY_AHEAD, "1", "--speculative-copy-ahead"),
        (DFlashOptions.PLANS_WITHIN_BOUNDS, "1", "--speculative-plans-within-bounds"),
        (DFlashOptions.DRAFT_SAMPLE_METHOD, "probabilistic", "--speculative-draft-sample-method"),
        (DFlashOptions.DRAFT_HEAD_DTYPE, "fp8", "--speculative-draft-head-dtype"),
    ],
)
def test_what_only_ours_has_is_not_dropped_silently(option, value, flag, monkeypatch):
    monkeypatch.setenv(option.variable, value)
    with pytest.raises(ValueError, match="(?s)--attn-cp-size.*it lacks .*which was requested") as refused:
        resolve(record_of(attn_cp_size=2))
    assert flag in str(refused.value)


def test_a_speculators_draft_does_not_fall_back():
    with pytest.raises(ValueError, match="(?s)--attn-cp-size.*a reader of speculators checkpoints"):
        resolve(record_of(SPECULATORS_DRAFT, attn_cp_size=2))


# name -> (changes to the draft's config, arguments, words of ours, words of the built-in's own refusal)
REFUSED_BY_BOTH = {
    "pipeline parallelism": ({}, {"pp_size": 2}, "--pp-size", "pp_size == 1"),
    "DP attention without a whole head": (
        {},
        DP,
        "--enable-dp-lm-head",
        "requires --enable-dp-lm-head",
    ),
    "heads that cannot be split": ({}, {"tp_size": 3}, "cannot be split over --tp 3", "either"),
    "context and DP attention": (
        {},
        {"attn_cp_size": 2, "attn_dp_size": 2, "tp_size": 4, "enable_dp_lm_head": True},
        "--attn-cp-size",
        "does not support context parallel",
    ),
    "a CPU": (
        {"use_gemma_norm": True},
        {"device": "cpu", "attention_backend": "torch_native"},
        "Gemma's RMSNorm",
        "not supported by",
    ),
    "a Domino draft that nobody reads": (
        {"dflash_config": {"projector_type": "domino"}},
        {},
        "dflash_config.projector_type",
        "shift_label",
    ),
}

REFUSED_BY_BOTH |= {name: (*FALLBACKS[name], "does not support dp attention") for name in NEED_DP}
if BUILTIN_LACKS_DP:
    for name in ("DP attention without a whole head", "context and DP attention"):
        REFUSED_BY_BOTH[name] = (*REFUSED_BY_BOTH[name][:3], "does not support dp attention")


@pytest.mark.parametrize("name", REFUSED_BY_BOTH)
def test_a_refusal_names_both_reasons(name, tmp_path):
    changes, arguments, ours, theirs = REFUSED_BY_BOTH[name]
    record = record_of(changed_draft(changes, tmp_path), **arguments)
    before = copy.deepcopy(contents(record))
    with pytest.raises(ValueError, match="DFLASH does not support") as refused:
        resolve(record)
    assert ours in str(refused.value) and theirs in str(refused.value)
    assert contents(record) == before


def test_children_learn_the_decision():
    record = pickle.loads(pickle.dumps(resolve(record_of(attn_cp_size=2))))
    decision = Implementation.from_server_args(record)
    assert decision.name == "sglang" and "--attn-cp-size" in decision.because[0] and decision.lost
    assert Implementation.from_server_args(record_of()).name == "sglang-dflash"


def targets_of(table) -> dict:
    return {change.target: patch.resolve(change.target)[1] for change in table}


@pytest.mark.parametrize(
    "arguments", [{"attn_cp_size": 2}, {"attn_cp_size": 2, "disaggregation_mode": "decode"}]
)
def test_a_scheduler_of_a_fallback_runs_plain_sglang(arguments, monkeypatch):
    """Only the report in /server_info is ours."""
    record = resolve(record_of(**arguments))
    installed = []
    monkeypatch.setattr(patch, "install", lambda table: installed.append(table) or [])
    before = targets_of(patches.AT_WORKER)
    served = SpeculativeAlgorithm.from_string(resolved_view(record).speculative_algorithm)
    assert served.create_worker(record).__module__ == "sglang.srt.speculative.dflash_worker_v2"
    entry_points.patch_at_load()  # as its children do, with the launcher's environment
    assert installed == [patches.AT_LOAD, patches.AT_FALLBACK]
    assert targets_of(patches.AT_WORKER) == before
    [report] = patches.AT_FALLBACK
    assert report.name == "_add_speculative"


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
        draft_worker=SimpleNamespace(width_report={}, copy_report={}, plan_report={}),
    )
    state: dict = {}
    adding_reports()(SimpleNamespace(scheduler=scheduler), state)
    assert state["speculative_implementation"]["name"] == name


# (field, value, part of the warning)
IGNORED = [
    ("speculative_num_steps", 3, "--speculative-num-steps"),
    ("speculative_eagle_topk", 4, "--speculative-eagle-topk"),
    ("speculative_token_map", "map.pt", "--speculative-token-map"),
    ("speculative_use_block_verification", True, "--speculative-use-block-verification"),
    ("speculative_accept_threshold_acc", 0.5, "--speculative-accept-threshold-acc"),
    ("speculative_accept_threshold_single", 0.5, "--speculative-accept-threshold-single"),
]


@pytest.mark.parametrize("field, value, words", IGNORED)
def test_flags_that_plain_sglang_overrides_get_a_warning(field, value, words, caplog):
    record = resolve(record_of(**{field: value}))
    args = resolving_view(record)
    assert not Implementation.from_server_args(record).is_builtin
    assert (args.speculative_num_steps, args.speculative_eagle_topk) == (1, 1)
    [warning] = [text.getMessage() for text in caplog.records if "DFLASH ignores" in text.getMessage()]
    assert words in warning


NO_CACHE = {"enable_mixed_chunk": True, "disable_radix_cache": True}


@pytest.mark.parametrize(
    "given, field, served, words",
    [
        ({"enable_mixed_chunk": True, "page_size": 16}, "enable_mixed_chunk", False, "--page-size 16"),
        (
            {"enable_mixed_chunk": True, "page_size": 1},
            "enable_mixed_chunk",
            *((False, "on this SGLang") if IS_0_5_22 else (True, None)),
        ),
        (NO_CACHE | {"page_size": 16}, "enable_mixed_chunk", False, "--disable-radix-cache"),
        (NO_CACHE | {"page_size": 1}, "enable_mixed_chunk", True, None),
        (
            {"speculative_num_draft_tokens": 33, "mamba_track_interval": 64},
            "mamba_track_interval",
            128,
            "every 128 tokens instead of every 64",
        ),
    ],
)
def test_what_would_spoil_the_prefix_cache_of_recurrent_states_is_adjusted(
    given, field, served, words, caplog
):
    record = resolve(record_of(HYBRID_DRAFT, model_path=str(HYBRID_TARGET), **given))
    assert not Implementation.from_server_args(record).is_builtin
    assert getattr(resolving_view(record), field) == served
    assert words is None or words in caplog.text


def test_widths_of_eagle_get_a_warning(tmp_path, caplog):
    path = tmp_path / "eagle.json"
    path.write_text('{"1": {"candidate_steps": [1, 3]}}')
    record = resolve(record_of(speculative_adaptive=True, speculative_adaptive_config=str(path)))
    assert AdaptiveSettings.from_environment() == AdaptiveSettings()
    assert not resolving_view(record).speculative_adaptive
    assert "does not follow --speculative-adaptive-config" in caplog.text and "EAGLE's form" in caplog.text


# name -> (changes to the draft's config, text of the warning)
ASSUMED = {
    "no block size": ({"block_size": REMOVE}, "block_size is missing, 16 is assumed"),
    "no mask token": ({"dflash_config": {"mask_token_id": REMOVE}}, "<|MASK|> is assumed"),
    "another depth": ({"num_target_layers": 36}, "num_target_layers is 36"),
    "another order": ({"dflash_config": {"target_layer_ids": [10, 7, 4, 1]}}, ""),
}


@pytest.mark.parametrize("name", ASSUMED)
def test_checkpoints_that_plain_sglang_takes_are_served(name, tmp_path, caplog, monkeypatch):
    changes, words = ASSUMED[name]
    if name == "no mask token":  # the bundled target's embedding has no row to spare for it
        monkeypatch.setattr("sglang_dflash.srt.arg_groups.resolve.find_mask_token", lambda *_: 3)
    record = resolve(record_of(make_draft(tmp_path / "draft", base=DRAFT, **changes)))
    assert not Implementation.from_server_args(record).is_builtin
    assert words in caplog.text
    if name == "no block size":
        assert resolving_view(record).speculative_num_draft_tokens == 16


def test_what_is_told_at_the_start_is_told_once(tmp_path, caplog):
    """Fields that are not read, and a block beyond the trained one of 8, by name."""
    changes = {"loss_gamma": 4.0, "dflash_config": {"num_anchors": 512, "projector_type": "dflash"}}
    resolve(record_of(changed_draft(changes, tmp_path), speculative_num_draft_tokens=16))
    [unread] = [text for text in caplog.messages if "not read" in text]
    assert unread.endswith("fields that are not read: loss_gamma, dflash_config.num_anchors.")
    [longer] = [text for text in caplog.messages if "trained for 7" in text]
    assert "15 tokens" in longer and "doctor --num-draft-tokens 16" in longer
    caplog.clear()
    resolve(record_of(speculative_num_draft_tokens=8))
    assert not [text for text in caplog.messages if "not read" in text or "trained for" in text]


def test_quantization_of_the_target_is_not_the_drafts(caplog):
    caplog.set_level(logging.INFO)
    inherited = quantize_draft("fp8", is_given=False)
    args = resolving_view(resolve(record_of(quantization="fp8", **inherited)))
    assert args.speculative_draft_model_quantization is None and args.quantization == "fp8"
    assert "--quantization fp8 is the target's" in caplog.text


def test_nothing_experimental_is_on_by_default_on_a_gpu():
    args = resolving_view(resolve(record_of(HYBRID_DRAFT, model_path=str(HYBRID_TARGET))))
    assert AdaptiveSettings.from_environment() is None and not args.enable_linear_replayssm_spec
    assert not DFlashOptions.COPY_AHEAD.get() and not DFlashOptions.PLANS_WITHIN_BOUNDS.get()
    assert DFlashOptions.DRAFT_HEAD_DTYPE.get() == "auto"


def test_a_plain_cycle_leaves_out_what_is_extra(monkeypatch, caplog):
    """One option for all of it, which one line lists."""
    monkeypatch.setenv(DFlashOptions.COPY_AHEAD.variable, "1")
    monkeypatch.setenv(DFlashOptions.DRAFT_HEAD_DTYPE.variable, "fp8")
    monkeypatch.setenv(DFlashOptions.PLANS_WITHIN_BOUNDS.variable, "1")
    given = dict(model_path=str(HYBRID_TARGET), enable_linear_replayssm_spec=True)

    def served(**more) -> tuple[bool, ...]:
        args = resolving_view(resolve(record_of(HYBRID_DRAFT, **given, **more)))
        return (
            AdaptiveSettings.from_environment() is not None,
            DFlashOptions.COPY_AHEAD.get(),
            DFlashOptions.DRAFT_HEAD_DTYPE.get() == "fp8",
            DFlashOptions.PLANS_WITHIN_BOUNDS.get(),
            args.enable_linear_replayssm_spec,
        )

    assert served() == (False, True, True, True, True)
    assert "PLAIN_CYCLE" not in caplog.text
    monkeypatch.setenv(DFlashOptions.PLAIN_CYCLE.variable, "1")
    caplog.clear()
    assert not any(served(speculative_adaptive=True))
    [said] = [message for message in caplog.messages if "SGLANG_DFLASH_PLAIN_CYCLE=1" in message]
    for part in ("adaptive", "bounds", "copies", "FP8 head", "ReplaySSM"):
        assert part in said
    monkeypatch.setenv(DFlashOptions.PLAIN_CYCLE.variable, "")
    given["enable_linear_replayssm_spec"] = False
    assert served(speculative_adaptive=True)[0]


def test_a_plain_cycle_names_only_what_was_asked_for(monkeypatch, caplog):
    monkeypatch.setenv(DFlashOptions.PLAIN_CYCLE.variable, "1")
    resolve(record_of())
    [said] = [message for message in caplog.messages if "SGLANG_DFLASH_PLAIN_CYCLE=1" in message]
    assert not [part for part in ("copies", "FP8", "bounds", "ReplaySSM") if part in said]


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


def test_no_row_of_the_pages_ends_a_start_that_the_built_in_serves():
    pages = [(ROOT / "docs" / f"{name}.md").read_text() for name in ("compatibility", "limits")]
    header: list[str] = []
    rows = 0
    for line in "\n".join(pages).splitlines():
        cells = [cell.strip() for cell in line.replace("\\|", "/").strip("|").split("|")]
        if not line.startswith("|"):
            header = []
        elif not header:
            header = cells
        elif "built-in" in header and cells[header.index("built-in")].startswith("served"):
            here = cells[header.index("CUDA" if "CUDA" in header else "here")].replace("CPU: refused", "")
            assert "refused" not in here, line
            rows += 1
    assert rows > 20


# Found once ours is to serve: name -> (changes to the draft's config, arguments)
REFUSED_LATER = {
    "no draft": ({}, {"speculative_draft_model_path": None}),
    "two block sizes": ({}, {"speculative_num_draft_tokens": 4, "speculative_dflash_block_size": 8}),
    "no block": ({}, {"speculative_dflash_block_size": 0}),
    "half of a convolution": (
        {"architectures": ["DFlash2DraftModel"], "dflash_config": {"conv_kernel_size": 2}},
        {},
    ),
}


@pytest.mark.parametrize("name", REFUSED_LATER)
def test_the_built_in_refuses_it_too(name, tmp_path):
    changes, arguments = REFUSED_LATER[name]
    draft = changed_draft(changes, tmp_path)
    with pytest.raises(ValueError):
        resolve(record_of(draft, **arguments))
    assert builtin_refusal(record_of(draft, **arguments))
