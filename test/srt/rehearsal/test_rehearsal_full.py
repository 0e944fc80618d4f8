"""All other rehearsals: `make test ARGS="-m rehearsal_full"`.

They take half an hour on two cores. As in test_rehearsal.py, the output must be the target's, and the
acceptance that of the CPU path.
"""

import json
import shutil
import time
from collections import Counter
from http.client import HTTPException
from pathlib import Path

import pytest
import torch
from serving import (
    DFLASH2_DRAFT,
    DRAFT,
    PEAGLE_DRAFT,
    SPECULATORS_DRAFT,
    TARGET,
    ServerDied,
    dflash_arguments,
    heldout_prompts,
)
from support import sequence_probs as sequences
from support.drafts import make_draft
from support.parity import assert_same
from support.rehearsal.compare import (
    CHANGING,
    CONCURRENCY,
    NO_CACHE,
    Expected,
    acceptance,
    assert_as_expected,
    assert_launches,
    greedy_requests,
    requests_across_chunks,
    verifying,
)
from support.rehearsal.play import ARGUMENTS, on_cpu, rehearse
from support.rehearsal.stage import Scene
from support.servers import patched
from transformers import AutoModelForCausalLM

from sglang_dflash.srt.speculative.cycle.ragged_graphs import row_sizes

pytestmark = [pytest.mark.server, pytest.mark.rehearsal_full, on_cpu]

DRAFTS = {"dflash": DRAFT, "speculators": SPECULATORS_DRAFT, "peagle": PEAGLE_DRAFT, "dflash2": DFLASH2_DRAFT}
WINDOW = 12
# TensorRT-LLM's kernels read whole pages.
PAGES = {"trtllm_mha": ("--page-size", 16)}
NUM_GRAPHS = 2 * 3  # of target and draft, for 1, 2 and 4 requests


@pytest.fixture(scope="module")
def expected(servers) -> Expected:
    return Expected(servers)


@pytest.fixture(scope="session")
def sliding_drafts(tmp_path_factory) -> dict[str, Path]:
    """Copies of the bundled drafts with a short sliding window in every layer."""
    return {
        name: copy_with_layers(draft, tmp_path_factory.mktemp(name), "sliding_attention", WINDOW)
        for name, draft in DRAFTS.items()
    }


def copy_with_layers(draft: Path, folder: Path, kind: str, window: int | None) -> Path:
    """Copy a draft with attention of one kind in every layer."""
    copy = folder / draft.name
    shutil.copytree(draft, copy, copy_function=lambda source, target: Path(target).symlink_to(source))
    config = json.loads((draft / "config.json").read_text())
    layers = config.get("transformer_layer_config", config)
    kinds = [kind] * layers["num_hidden_layers"]
    layers |= {"sliding_window": window, "use_sliding_window": window is not None, "layer_types": kinds}
    (copy / "config.json").unlink()
    (copy / "config.json").write_text(json.dumps(config))
    return copy


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("backend", ["flashinfer", "fa3"])
def test_backend_and_draft(backend, draft, expected, reference):
    requests = greedy_requests()
    expected.answers(DRAFTS[draft], requests)
    with rehearse(Scene(backend), DRAFTS[draft], NO_CACHE) as played:
        assert_as_expected(played, DRAFTS[draft], requests, expected, reference)
        if draft in ("dflash", "dflash2"):  # the others have sliding layers, for which FlashInfer waits
            assert played.waits() == []
        if draft in ("dflash", "peagle"):  # the other drafts run as DFlash
            assert_launches(played, f"{backend}-{draft}")


@pytest.mark.parametrize("draft", ["dflash", "peagle"])
def test_trtllm_mha(draft, expected, reference):
    """SGLang's default for the target on a Blackwell GPU. The draft runs on FlashInfer."""
    requests = greedy_requests()
    with rehearse(Scene("trtllm_mha"), DRAFTS[draft], NO_CACHE, *PAGES["trtllm_mha"]) as played:
        assert_as_expected(played, DRAFTS[draft], requests, expected, reference)
        backends = {note["role"]: note["name"] for note in played.notes("backend")}
        assert backends == {"target": "TRTLLMHAAttnBackend", "draft": "FlashInferAttnBackend"}
        assert draft == "peagle" or played.waits() == []


@pytest.mark.parametrize("backend", ["flashinfer", "fa3"])
def test_the_built_in_worker(backend, expected, reference):
    """Count the launches of SGLang's built-in worker the same way, for comparison."""
    requests = greedy_requests()
    expected.answers(DRAFT, requests)
    with rehearse(Scene(backend, is_built_in=True), DRAFT, NO_CACHE) as played:
        assert_as_expected(played, DRAFT, requests, expected, reference)
        assert_launches(played, f"built-in/{backend}-dflash")


def test_a_server_that_falls_back(reference, tmp_path):
    """Serve a draft that only the built-in reads, from our decision in the launcher on."""
    draft = make_draft(tmp_path / "draft", base=DRAFT, use_gemma_norm=True)
    requests = greedy_requests()
    with rehearse(Scene("fa3", is_fallback=True), draft, NO_CACHE) as played:
        answers = played.server.generate_many(requests, CONCURRENCY)
        assert_same(requests, answers, reference.answers(requests))
        assert all(answer["meta_info"]["spec_verify_ct"] > 0 for answer in answers)
        [state] = played.server.get("/server_info")["internal_states"]
        assert state["speculative_implementation"]["name"] == "sglang"
        assert "Gemma's RMSNorm" in state["speculative_implementation"]["because"][0]
        assert played.server.log().count("built-in implementation serves this server") == 1
        assert "sglang-dflash DFlashWorker" not in played.server.log()


@pytest.mark.parametrize("draft", DRAFTS)
def test_triton(draft, expected, reference):
    """Run SGLang's attention kernels in Triton's interpreter, on short requests."""
    requests = greedy_requests(3, 16)
    expected.answers(DRAFTS[draft], requests)
    with rehearse(Scene("triton", buckets=(4,)), DRAFTS[draft], NO_CACHE) as played:
        assert_as_expected(played, DRAFTS[draft], requests, expected, reference)


@pytest.mark.parametrize(
    ("backend", "draft"), [("flashinfer", "speculators"), ("fa3", "dflash"), ("fa3", "peagle")]
)
def test_sliding_layers(backend, draft, sliding_drafts, expected, reference):
    """Use the backends that `choose_draft_attention` selects for sliding layers."""
    requests = greedy_requests()
    expected.answers(sliding_drafts[draft], requests)
    with rehearse(Scene(backend), sliding_drafts[draft], NO_CACHE) as played:
        assert_as_expected(played, sliding_drafts[draft], requests, expected, reference)


def test_peagle_on_flashinfer_without_sliding_layers(expected, reference, tmp_path):
    """Blocks that end at a bound of the length. The bundled draft has a sliding layer, and waits."""
    draft = copy_with_layers(PEAGLE_DRAFT, tmp_path, "full_attention", None)
    requests = greedy_requests()
    expected.answers(draft, requests)
    with rehearse(Scene("flashinfer"), draft, NO_CACHE) as played:
        assert_as_expected(played, draft, requests, expected, reference)
        assert played.waits() == []


def test_a_plain_cycle(expected, reference):
    """SGLang's own plans and replays, which wait for exact lengths. The FP8 head is switched off."""
    requests = greedy_requests()
    plain = {"SGLANG_DFLASH_PLAIN_CYCLE": "1", "SGLANG_DFLASH_DRAFT_HEAD_DTYPE": "fp8"}
    with rehearse(Scene("flashinfer"), DRAFT, NO_CACHE, environment=plain) as played:
        assert_as_expected(played, DRAFT, requests, expected, reference)
        assert played.waits() != []
        [state] = played.server.get("/server_info")["internal_states"]
        assert "speculative_plans" not in state, "none is ours"


def test_checked_plans(reference):
    """Let the server compare its plans with the device's lengths itself, and end on a difference."""
    requests, checking = requests_across_chunks(), {"SGLANG_DFLASH_CHECK_PLANS": "1"}
    with rehearse(Scene("flashinfer"), DRAFT, NO_CACHE, environment=checking) as played:
        answers = played.server.generate_many(requests, 2)
        assert_same(requests, answers, reference.answers(requests))
        assert played.problems() == [] and played.waits() == []
        [state] = played.server.get("/server_info")["internal_states"]
        plans = state["speculative_plans"]
        assert plans.keys() == {"plans", "checked_plans"}
        # A graph's plan is checked when it plans again.
        assert 0 < plans["plans"] - plans["checked_plans"] <= NUM_GRAPHS
        played.plant("plain upper bounds")
        # The requests of a server that ends get no answer.
        with pytest.raises((OSError, HTTPException)):
            played.server.generate_many(requests, 2)
        deadline = time.monotonic() + 60
        while played.server.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        assert played.server.process.poll() not in (None, 0)
        assert "Please report this" in played.server.log()


def test_a_batch_beyond_the_captured_sizes_waits(expected, reference):
    """Its cycles run without graphs, with FlashInfer's own plans of exact lengths. That is counted."""
    requests = greedy_requests(3)
    expected.answers(DRAFT, requests)
    with rehearse(Scene("flashinfer", buckets=(1, 2)), DRAFT, NO_CACHE) as played:
        answers = played.server.generate_many(requests, 3)
        assert_same(requests, answers, reference.answers(requests))
        assert played.problems() == []
        assert acceptance(answers) == acceptance(expected.answers(DRAFT, requests))
        [state] = played.server.get("/server_info")["internal_states"]
        beyond = [step for step in played.steps_without_graphs() if step["bs"] > 2]
        assert len(beyond) == state["speculative_plans"]["cycles_without_graph"] > 0
        assert played.steps_without_graphs() == beyond


SETTINGS = {
    "draft window": ("flashinfer", DRAFT, "--speculative-draft-window-size", WINDOW),
    "draft window without host lengths": ("fa3", DRAFT, "--speculative-draft-window-size", WINDOW),
    "pages": ("fa3", DRAFT, "--page-size", 16),
    "pages, P-EAGLE": ("flashinfer", PEAGLE_DRAFT, "--page-size", 16),
    "chunked prefill": ("fa3", PEAGLE_DRAFT, "--chunked-prefill-size", 16),
    "fewer drafted tokens": ("fa3", PEAGLE_DRAFT, "--speculative-num-draft-tokens", 3),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_setting(name, expected, reference):
    backend, draft, *arguments = SETTINGS[name]
    requests = greedy_requests()
    expected.answers(draft, requests, *arguments)
    with rehearse(Scene(backend), draft, NO_CACHE, *arguments) as played:
        assert_as_expected(played, draft, requests, expected, reference, *arguments)


def kinds_of_requests() -> list[dict]:
    """Return requests with and without a grammar, penalties and log probabilities."""
    # A grammar's last token is the end of the text. With ignore_eos stock SGLang would emit one more token.
    grammar = {"regex": "[a-z ]{8,24}", "ignore_eos": False}
    kinds = ({}, grammar, {"frequency_penalty": 0.6, "repetition_penalty": 1.2}, {"min_new_tokens": 8})
    requests = [greedy_requests(n + 1, 24, **kind)[n] for n, kind in enumerate(kinds)]
    return [*requests, greedy_requests(5, 24)[4] | {"return_logprob": True, "top_logprobs_num": 2}]


OWN_LENGTHS = [
    ("fa3", "dflash"),
    ("fa3", "peagle"),
    ("flashinfer", "dflash2"),
    ("trtllm_mha", "dflash"),
]


def test_own_lengths_on_triton(servers, reference, tmp_path):
    """The same in Triton's interpreter, on fewer and shorter requests."""
    requests, lengths = greedy_requests(3, 16), verifying(tmp_path, 6)
    for request, cap in zip(requests, (3, 0, 7), strict=True):
        request["sampling_params"] |= {"custom_params": {"speculative_max_tokens": cap}}
    on_cpu = servers.get(*ARGUMENTS, *dflash_arguments(DRAFT), NO_CACHE, *lengths)
    wanted = on_cpu.generate_many(requests, 3)
    with rehearse(Scene("triton", buckets=(4,)), DRAFT, NO_CACHE, *lengths) as played:
        answers = played.server.generate_many(requests, 3)
        assert_same(requests, answers, reference.answers(requests))
        assert acceptance(answers) == acceptance(wanted)
        assert_own_lengths(played)


def test_own_lengths_that_change_on_triton(reference, tmp_path):
    requests = greedy_requests(3, 16)
    arguments = NO_CACHE, *verifying(tmp_path, *CHANGING)
    with rehearse(Scene("triton", buckets=(4,)), DRAFT, *arguments) as played:
        assert_same(requests, played.server.generate_many(requests, 3), reference.answers(requests))
        assert_own_lengths(played)


def assert_own_lengths(played) -> None:
    """Check that each step replayed a graph of the target, that no host waited, and that lengths differed."""
    assert played.problems() == [] and played.waits() == []
    steps = played.notes("step")
    assert {step["replays"]["target"] for step in steps} == {1}
    assert max(step["bs"] for step in steps) > 1
    [state] = played.server.get("/server_info")["internal_states"]
    assert state["speculative_width"]["candidates"]
    assert len(state["speculative_width"]["blocks_per_length"]) > 1


@pytest.mark.parametrize(("backend", "draft"), OWN_LENGTHS)
def test_own_lengths(backend, draft, servers, reference, tmp_path):
    """Verify another number of tokens of each request, with one set of graphs for all numbers of rows."""
    requests, lengths = greedy_requests(), verifying(tmp_path, 6)
    for request, cap in zip(requests, (3, 0, 7, 1, 5), strict=True):
        request["sampling_params"] |= {"custom_params": {"speculative_max_tokens": cap}}
    on_cpu = servers.get(*ARGUMENTS, *dflash_arguments(DRAFTS[draft]), NO_CACHE, *lengths)
    wanted = [on_cpu.generate_many(requests, CONCURRENCY), on_cpu.generate_many(requests[:1], 1)]
    with rehearse(Scene(backend), DRAFTS[draft], NO_CACHE, *lengths, *PAGES.get(backend, ())) as played:
        answers = played.server.generate_many(requests, CONCURRENCY)
        # The graph of 4 rows, for up to 4 requests, runs the block of one.
        alone = played.server.generate_many(requests[:1], 1)
        for found, expected in zip((answers, alone), wanted, strict=True):
            assert_same(requests[: len(found)], found, reference.answers(requests[: len(found)]))
            assert acceptance(found) == acceptance(expected)
        assert played.problems() == [] and played.waits() == []
        steps = played.notes("step")
        assert {step["replays"]["target"] for step in steps} == {1}
        assert max(step["bs"] for step in steps) > 1
        captures = Counter(note["role"] for note in played.notes("capture"))
        assert captures == {"draft": 3, "target": 3 + len(row_sizes(4, 8))}
        [state] = played.server.get("/server_info")["internal_states"]
        assert state["speculative_width"]["candidates"]
        assert state["speculative_width"]["blocks_per_length"].keys() == {"0", "1", "3", "5", "6"}


@pytest.mark.parametrize(("backend", "draft"), OWN_LENGTHS)
def test_own_lengths_that_change(backend, draft, reference, tmp_path):
    """Verify none, some and all, another number for each request and cycle, of unlike requests."""
    requests = kinds_of_requests()
    arguments = *verifying(tmp_path, *CHANGING), *PAGES.get(backend, ())
    with rehearse(Scene(backend), DRAFTS[draft], *arguments) as played:
        answers = played.server.generate_many(requests, CONCURRENCY)
        assert_same(requests, answers, reference.answers(requests))
        assert played.problems() == [] and played.waits() == []
        assert {step["replays"]["target"] for step in played.notes("step")} == {1}
        assert {step["replays"]["draft"] for step in played.notes("step")} == {0, 1}
        assert sum(map(sum, acceptance(answers))) > 0


@pytest.mark.parametrize("backend", ["fa3", "flashinfer", "trtllm_mha"])
def test_own_lengths_with_copies(backend, reference, tmp_path):
    """Copy and draft in one batch. The host learns a cycle or two late whether there was a match."""
    requests = greedy_requests(4, 64)
    arguments = "--speculative-copy-ahead", *verifying(tmp_path, *CHANGING), *PAGES.get(backend, ())
    with rehearse(Scene(backend), DRAFT, *arguments) as played:
        answers = played.server.generate_many(requests, CONCURRENCY)
        assert_same(requests, answers, reference.answers(requests))
        assert played.problems() == [] and played.waits() == []
        steps = played.notes("step")
        assert {step["replays"]["target"] for step in steps} == {1}
        assert {step["replays"]["draft"] for step in steps} == {0, 1}
        [state] = played.server.get("/server_info")["internal_states"]
        assert state["speculative_width"]["candidates"]
        accepted = state["speculative_copy_ahead"]["accepted_tokens"]
        assert accepted["copy"] > 10 and accepted["draft"] > 10, accepted


def test_our_context_kernel(expected, reference):
    """Interpret our context kernel; the other servers run its PyTorch twin."""
    requests = greedy_requests(3, 16)
    expected.answers(DRAFT, requests)
    with rehearse(Scene("flashinfer", interprets_context_kv=True), DRAFT, NO_CACHE) as played:
        assert_as_expected(played, DRAFT, requests, expected, reference)


@pytest.mark.parametrize("draft", [DRAFT, PEAGLE_DRAFT], ids=["dflash", "peagle"])
def test_nothing_drafted(draft, reference):
    requests = greedy_requests(3, 16)
    with rehearse(Scene("fa3"), draft, "--speculative-num-draft-tokens", 1) as played:
        answers = played.server.generate_many(requests, 3)
        assert_same(requests, answers, reference.answers(requests))
        assert {json.dumps(step["replays"]) for step in played.notes("step")} == {'{"target": 1, "draft": 0}'}


@pytest.mark.parametrize("backend", ["flashinfer", "fa3"])
def test_kinds_of_requests(backend, expected, reference):
    """Mix grammars, penalties and log probabilities in one batch."""
    requests = kinds_of_requests()
    expected.answers(DRAFT, requests)
    with rehearse(Scene(backend), DRAFT, NO_CACHE) as played:
        answers = assert_as_expected(played, DRAFT, requests, expected, reference)
    found, wanted = (
        a[-1]["meta_info"]["output_token_logprobs"] for a in (answers, reference.answers(requests))
    )
    assert [entry[0] for entry in found] == pytest.approx([entry[0] for entry in wanted], abs=1e-4)


@pytest.mark.parametrize("draft", [DRAFT, PEAGLE_DRAFT], ids=["dflash", "peagle"])
def test_mixed_prefill_shared_prefixes_and_retraction(draft, reference):
    """Compare the output only, because block starts depend on timing.

    The pool holds two of four requests. The scheduler admits more, under an estimate of short answers.
    """
    long = [prompt["text"] for prompt in heldout_prompts() if 60 <= prompt["num_tokens"] <= 90][:4]
    sampling = {"temperature": 0, "max_new_tokens": 72, "ignore_eos": True}
    requests = [{"text": text, "sampling_params": sampling} for text in (*long, long[0] + " # again")]
    crowded = "--enable-mixed-chunk", "--chunked-prefill-size", 32, "--max-total-tokens", 384
    with rehearse(
        Scene("flashinfer"), draft, *crowded, environment=patched("rehearsal overcommit")
    ) as played:
        answers = played.server.generate_many(requests, 4)
        assert_same(requests, answers, reference.answers(requests))
        assert played.problems() == [] and played.steps_without_graphs() == []
        assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0


@pytest.mark.parametrize("draft", [DRAFT, PEAGLE_DRAFT], ids=["dflash", "peagle"])
def test_prefill_graphs_behind_cached_prefixes(draft, reference):
    """Prefill graphs, warm-up and prefix cache, as SGLang has them by default."""
    requests = requests_across_chunks()
    longer = [{**request, "text": request["text"] + "\n# for each name in values"} for request in requests]
    with rehearse(Scene("fa3"), draft) as played:
        for group in (requests, longer):
            answers = played.server.generate_many(group, 1)
            assert_same(group, answers, reference.answers(group))
        assert all(answer["meta_info"]["cached_tokens"] > 64 for answer in answers)
        sizes = [note["tokens"] for note in played.notes("prefill replay")]
        assert min(sizes[1:4]) > 64 > max(sizes[4:]) and len(sizes) == 7  # the first is SGLang's warm-up
        assert played.problems() == [] and played.steps_without_graphs() == []


@pytest.mark.parametrize("draft", [DRAFT, PEAGLE_DRAFT], ids=["dflash", "peagle"])
def test_probabilistic_drafting(draft):
    """Repeat test_sampled_sequences.py with fewer samples."""
    prompt = sequences.PROMPTS[0]
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    wanted = {prompt: sequences.sequence_probs(model, prompt)}
    with rehearse(Scene("flashinfer"), draft, *sequences.PROBABILISTIC) as played:
        counted = {prompt: sequences.sampled_by(played.server, prompt, 512)}
        found = sequences.p_value(counted, wanted)
        assert played.problems() == [] and played.steps_without_graphs() == []
    assert found > sequences.FALSE_ALARM, f"not the target's distribution, p = {found:.2g}"


def test_a_causal_draft_is_noticed(expected, reference):
    """A causal draft changes the acceptance only, and slightly."""
    requests = greedy_requests()
    wanted = expected.answers(DRAFT, requests)
    with rehearse(Scene("fa3", fault="causal draft"), DRAFT, NO_CACHE) as played:
        answers = played.server.generate_many(requests, 3)
        assert_same(requests, answers, reference.answers(requests))
        assert played.problems() == [] and played.steps_without_graphs() == []
        assert acceptance(answers) != acceptance(wanted)


def test_a_forgotten_static_buffer_is_noticed():
    """A graph that reads a temporary tensor ends the server at the warm-up request."""
    with pytest.raises(ServerDied, match="reads memory that nobody has kept since the capture"):
        with rehearse(Scene("fa3", fault="forgotten buffer"), DRAFT):
            pass
