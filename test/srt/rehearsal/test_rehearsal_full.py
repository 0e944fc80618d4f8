"""All other rehearsals: `make test ARGS="-m rehearsal_full"`.

They take half an hour on two cores. As in test_rehearsal.py, the output must be the target's, and the
acceptance that of the CPU path.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
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
    MOST_OPERATIONS,
    NO_CACHE,
    Expected,
    acceptance,
    assert_copies_beside_drafts,
    assert_graphs_of_rows,
    assert_launches,
    assert_target_graphs,
    cap_lengths,
    greedy_requests,
    requests_across_chunks,
    verifying,
)
from support.rehearsal.play import ARGUMENTS, Rehearsal, on_cpu, rehearse
from support.rehearsal.stage import Scene
from support.servers import patched
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.server, pytest.mark.rehearsal_full, on_cpu]

DRAFTS = {"dflash": DRAFT, "speculators": SPECULATORS_DRAFT, "peagle": PEAGLE_DRAFT, "dflash2": DFLASH2_DRAFT}
WINDOW = 12
# TensorRT-LLM's kernels read whole pages.
PAGES = {"trtllm_mha": ("--page-size", 16)}
LATE = Scene("flashinfer", draft="fa3", waits_under_draft=True)
TRTLLM = Scene("trtllm_mha")  # the draft runs on FlashInfer
TRITON = Scene("triton", buckets=(4,))  # interpreted, on short requests
DFLASH_AND_PEAGLE = pytest.mark.parametrize("draft", [DRAFT, PEAGLE_DRAFT], ids=["dflash", "peagle"])


@pytest.fixture(scope="module")
def expected(servers, reference) -> Expected:
    return Expected(servers, reference)


def copy_with_layers(draft: Path, folder: Path, kind: str, window: int | None = None) -> Path:
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
def test_backend_and_draft(backend, draft, expected):
    with expected.rehearsed(Scene(backend), DRAFTS[draft]) as played:
        assert (played.waits() == []) == (backend == "fa3")
        if draft in ("dflash", "peagle"):  # the other drafts run as DFlash
            assert_launches(played, f"{backend}-{draft}")


@pytest.fixture(scope="module")
def late(expected) -> Iterator[Rehearsal]:
    expected.answers(DRAFT, greedy_requests())
    with rehearse(LATE, DRAFT, NO_CACHE) as played:
        yield played


# Waits, plans and replays between two publications of lengths.
UNDER_THE_DRAFT = ("draft", "wait", "plan", "target")


def test_dflash_with_the_wait_under_the_draft(late, expected, reference):
    """The draft is launched with the device's lengths. The verify is planned with exact ones."""
    expected.compare(late, DRAFT, greedy_requests())
    assert_launches(late, "flashinfer-late-dflash")
    assert set(map(tuple, late.orders())) == {UNDER_THE_DRAFT}
    assert set(late.waits()) == {"lengths"}
    requests = requests_across_chunks()
    late.forget()
    assert_same(requests, late.server.generate_many(requests, 2), reference.answers(requests))
    assert late.problems() == [] and set(map(tuple, late.orders())) == {UNDER_THE_DRAFT}


# fault -> a problem that is reported, and the order
LATE_FAULTS = {
    "wrong host length": ("keys on the host", UNDER_THE_DRAFT),
    # Its pinned memory may hold the last plan, whose copy waits behind the last verify.
    "no wait": ("overwritten before its copy is over", ("draft", "plan", "target")),
    "second wait": ("", ("wait", *UNDER_THE_DRAFT)),
}


@pytest.mark.parametrize("fault", LATE_FAULTS)
def test_a_fault_of_the_wait_is_noticed(fault, late):
    words, order = LATE_FAULTS[fault]
    late.forget()
    late.plant(fault)
    late.server.generate_many(greedy_requests()[:2], 2)
    late.plant("")
    assert any(words in problem for problem in late.problems()) or not words
    assert set(map(tuple, late.orders())) == {order}


@pytest.mark.parametrize("draft_backend", ["fa3", "triton"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_the_wait_under_the_draft(draft, draft_backend, expected):
    """The draft runs on a backend that needs no lengths on the host: Triton's on Ampere and Ada."""
    requests = greedy_requests(3, 16) if draft_backend == "triton" else None
    scene = replace(LATE, draft=draft_backend)
    with expected.rehearsed(scene, DRAFTS[draft], requests=requests) as played:
        assert set(map(tuple, played.orders())) == {UNDER_THE_DRAFT}
        if draft_backend == "fa3" and draft in ("dflash", "peagle"):
            assert_launches(played, f"flashinfer-late-{draft}")


@pytest.mark.parametrize("draft", ["dflash", "peagle"])
def test_trtllm_mha(draft, expected):
    """SGLang's default for the target on a Blackwell GPU. The draft runs on FlashInfer."""
    with expected.rehearsed(TRTLLM, DRAFTS[draft], pages=PAGES["trtllm_mha"]) as played:
        backends = {note["role"]: note["name"] for note in played.notes("backend")}
        assert backends == {"target": "TRTLLMHAAttnBackend", "draft": "FlashInferAttnBackend"}


@pytest.mark.parametrize("backend", ["flashinfer", "fa3"])
def test_the_built_in_worker(backend, expected):
    """SGLang's built-in worker drafts the same tokens. Its steps run more operations than ours."""
    with expected.rehearsed(Scene(backend, is_built_in=True), DRAFT) as played:
        fewest = min(sum(operations.values()) for operations in played.operations())
        assert fewest > MOST_OPERATIONS[f"{backend}-dflash"]


def test_a_server_that_falls_back(reference, tmp_path):
    """Serve a draft that only the built-in reads, from our decision in the launcher on."""
    draft = make_draft(tmp_path / "draft", base=DRAFT, use_gemma_norm=True)
    requests = greedy_requests()
    with rehearse(Scene("fa3", is_fallback=True), draft, NO_CACHE) as played:
        answers = played.server.generate_many(requests, CONCURRENCY)
        assert_same(requests, answers, reference.answers(requests))
        assert all(answer["meta_info"]["spec_verify_ct"] > 0 for answer in answers)
        served_by = played.state()["speculative_implementation"]
        assert served_by["name"] == "sglang" and "Gemma's RMSNorm" in served_by["because"][0]
        assert played.server.log().count("built-in implementation serves this server") == 1
        assert "sglang-dflash DFlashWorker" not in played.server.log()


WINDOW_SIZE = ("--speculative-draft-window-size", WINDOW)
CONTEXT_KERNEL = Scene("flashinfer", interprets_context_kv=True)  # elsewhere its PyTorch twin runs
SETTINGS = {
    **{f"Triton's interpreter, {name}": (TRITON, draft) for name, draft in DRAFTS.items()},
    "our context kernel": (CONTEXT_KERNEL, DRAFT),
    "draft window": (Scene("flashinfer"), DRAFT, *WINDOW_SIZE),
    "draft window without host lengths": (Scene("fa3"), DRAFT, *WINDOW_SIZE),
    "pages": (Scene("fa3"), DRAFT, "--page-size", 16),
    "pages, P-EAGLE": (Scene("flashinfer"), PEAGLE_DRAFT, "--page-size", 16),
    "draft window, the wait under the draft": (LATE, DRAFT, *WINDOW_SIZE),
    "pages, the wait under the draft": (LATE, DRAFT, "--page-size", 16),
    "chunked prefill": (Scene("fa3"), PEAGLE_DRAFT, "--chunked-prefill-size", 16),
    "fewer drafted tokens": (Scene("fa3"), PEAGLE_DRAFT, "--speculative-num-draft-tokens", 3),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_setting(name, expected):
    scene, draft, *arguments = SETTINGS[name]
    is_slow = scene in (TRITON, CONTEXT_KERNEL)
    requests = greedy_requests(3, 16) if is_slow else None
    with expected.rehearsed(scene, draft, *arguments, requests=requests):
        pass


@pytest.mark.parametrize(
    ("backend", "draft"), [("flashinfer", "speculators"), ("fa3", "dflash"), ("fa3", "peagle")]
)
def test_sliding_layers(backend, draft, expected, tmp_path):
    """Use the backends that `choose_draft_attention` selects for sliding layers."""
    sliding = copy_with_layers(DRAFTS[draft], tmp_path, "sliding_attention", WINDOW)
    with expected.rehearsed(Scene(backend), sliding):
        pass


def test_peagle_on_flashinfer_without_sliding_layers(expected, tmp_path):
    """Blocks end at a row that the length decides. The bundled draft has two wrappers for a sliding layer."""
    draft = copy_with_layers(PEAGLE_DRAFT, tmp_path, "full_attention")
    with expected.rehearsed(Scene("flashinfer"), draft):
        pass


def test_basic_mode(expected, reference):
    """SGLang's relay, which waits before the draft, although the wait under it is on."""
    plain = {"SGLANG_DFLASH_BASIC": "1"}
    requests = greedy_requests()
    wanted = expected.answers(DRAFT, requests)
    with rehearse(LATE, DRAFT, NO_CACHE, environment=plain) as played:
        answers = played.server.generate_many(requests, CONCURRENCY)
        assert_same(requests, answers, reference.answers(requests))
        assert acceptance(answers) == acceptance(wanted)
        assert all("is compiled in a step" in problem for problem in played.problems()), "no start-up cycles"
        assert played.problems() != [] and played.steps_without_graphs() == []
        assert set(map(tuple, played.orders())) == {("wait", "draft", "plan", "target")}


def test_cycles_at_start_up_that_fail(expected, reference):
    """The server says so and serves. Only kernels are compiled later."""
    requests = greedy_requests()
    wanted = expected.answers(DRAFT, requests)
    with rehearse(Scene("fa3", fault="failing start-up"), DRAFT, NO_CACHE) as played:
        assert "cycles at start-up failed" in played.server.log()
        answers = played.server.generate_many(requests, CONCURRENCY)
        assert_same(requests, answers, reference.answers(requests))
        assert acceptance(answers) == acceptance(wanted)
        assert played.steps_without_graphs() == []


def test_a_batch_beyond_the_captured_sizes(expected, reference):
    """Its cycles run without graphs, with FlashInfer's own plans of the lengths waited for."""
    requests = greedy_requests(3)
    expected.answers(DRAFT, requests)
    with rehearse(replace(LATE, buckets=(1, 2)), DRAFT, NO_CACHE) as played:
        answers = played.server.generate_many(requests, 3)
        assert_same(requests, answers, reference.answers(requests))
        assert played.problems() == []
        assert acceptance(answers) == acceptance(expected.answers(DRAFT, requests))
        beyond = [step for step in played.steps_without_graphs() if step["bs"] > 2]
        assert beyond and played.steps_without_graphs() == beyond


def kinds_of_requests() -> list[dict]:
    """Return requests with and without a grammar, penalties and log probabilities."""
    # A grammar's last token is the end of the text. With ignore_eos stock SGLang would emit one more token.
    grammar = {"regex": "[a-z ]{8,24}", "ignore_eos": False}
    kinds = ({}, grammar, {"frequency_penalty": 0.6, "repetition_penalty": 1.2}, {"min_new_tokens": 8})
    requests = [greedy_requests(n + 1, 24, **kind)[n] for n, kind in enumerate(kinds)]
    return [*requests, greedy_requests(5, 24)[4] | {"return_logprob": True, "top_logprobs_num": 2}]


def backend_of(value: object) -> object:
    """Return the backend of a scene, as a name of a test."""
    return getattr(value, "backend", value)


OWN_LENGTHS = pytest.mark.parametrize(
    ("scene", "draft"),
    [
        (Scene("fa3"), "dflash"),
        (Scene("fa3"), "peagle"),
        (Scene("fa3"), "dflash2"),
        (TRTLLM, "dflash"),
        (TRITON, "dflash"),
    ],
    ids=backend_of,
)


@OWN_LENGTHS
def test_own_lengths(scene, draft, servers, reference, tmp_path):
    """Verify another number of tokens of each request, with one set of graphs for all numbers of rows."""
    requests = greedy_requests(3, 16) if scene == TRITON else greedy_requests()
    caps, lengths = cap_lengths(requests), verifying(tmp_path, 6)
    on_cpu = servers.get(*ARGUMENTS, *dflash_arguments(DRAFTS[draft]), NO_CACHE, *lengths)
    wanted = [on_cpu.generate_many(requests, CONCURRENCY), on_cpu.generate_many(requests[:1], 1)]
    with rehearse(scene, DRAFTS[draft], NO_CACHE, *lengths, *PAGES.get(scene.backend, ())) as played:
        answers = played.server.generate_many(requests, CONCURRENCY)
        # The graph of 4 rows, for up to 4 requests, runs the block of one.
        alone = played.server.generate_many(requests[:1], 1)
        for found, expected in zip((answers, alone), wanted, strict=True):
            assert_same(requests[: len(found)], found, reference.answers(requests[: len(found)]))
            assert acceptance(found) == acceptance(expected)
        width = assert_target_graphs(played)["speculative_width"]
        assert scene == TRTLLM or played.waits() == []
        assert_graphs_of_rows(played, len(scene.buckets))
        assert width["candidates"] and width["blocks_per_length"].keys() == {str(min(cap, 6)) for cap in caps}


@OWN_LENGTHS
def test_own_lengths_that_change(scene, draft, reference, tmp_path):
    """Verify none, some and all, another number for each request and cycle, of unlike requests."""
    requests = greedy_requests(3, 16) if scene == TRITON else kinds_of_requests()
    arguments = *verifying(tmp_path, *CHANGING), *PAGES.get(scene.backend, ())
    with rehearse(scene, DRAFTS[draft], *arguments) as played:
        answers = played.server.generate_many(requests, CONCURRENCY)
        assert_same(requests, answers, reference.answers(requests))
        width = assert_target_graphs(played)["speculative_width"]
        assert scene == TRTLLM or played.waits() == []
        assert len(width["blocks_per_length"]) > 1
        assert scene == TRITON or {step["replays"]["draft"] for step in played.notes("step")} == {0, 1}
        assert sum(map(sum, acceptance(answers))) > 0


def test_own_lengths_with_copies(reference, tmp_path):
    scene = replace(TRTLLM, draft="fa3")
    assert_copies_beside_drafts(scene, reference, tmp_path, *PAGES["trtllm_mha"])


@pytest.mark.parametrize("scene", [Scene("fa3"), TRTLLM], ids=backend_of)
def test_own_lengths_of_one_request(scene, reference, tmp_path):
    """Start-up's cycles fit a server whose buffers hold one request."""
    requests = greedy_requests(2, 16)
    arguments = "--max-running-requests", 1, *verifying(tmp_path, *CHANGING), *PAGES.get(scene.backend, ())
    with rehearse(replace(scene, buckets=(1,)), DRAFT, *arguments) as played:
        answers = played.server.generate_many(requests, 1)
        assert_same(requests, answers, reference.answers(requests))
        assert played.problems() == []


@pytest.mark.parametrize("draft", ["dflash", "dflash2", "peagle"])
def test_lengths_by_the_costs(draft, reference):
    """By the costs of the tests, speculation pays for these requests."""
    requests = greedy_requests()
    with rehearse(Scene("fa3"), DRAFTS[draft], NO_CACHE, "--speculative-adaptive") as played:
        assert_graphs_of_rows(played)
        for count in (2, 4, 3):
            answers = played.server.generate_many(requests, count)
            assert_same(requests, answers, reference.answers(requests))
        width = assert_target_graphs(played)["speculative_width"]
        assert width["candidates"] == [1, 4, 8]
        assert sum(width["blocks_per_length"].values()) > 0 and sum(map(sum, acceptance(answers))) > 0


@DFLASH_AND_PEAGLE
def test_lengths_by_measured_costs(draft, reference):
    """Start-up measures cycles by events, whose times mean nothing here."""
    requests, measured = greedy_requests(2, 16), {"SERVER_PATCH": "rehearsal"}
    arguments = NO_CACHE, "--max-running-requests", 1, "--speculative-adaptive"
    with rehearse(Scene("fa3", buckets=(1,)), draft, *arguments, environment=measured) as played:
        assert "DFLASH adaptive: widths [1, 4, 8] measured for [1] requests" in played.server.log()
        answers = played.server.generate_many(requests, 1)
        assert_same(requests, answers, reference.answers(requests))
        assert played.problems() == []


@DFLASH_AND_PEAGLE
def test_nothing_drafted(draft, reference):
    requests = greedy_requests(3, 16)
    with rehearse(Scene("fa3"), draft, "--speculative-num-draft-tokens", 1) as played:
        answers = played.server.generate_many(requests, 3)
        assert_same(requests, answers, reference.answers(requests))
        assert {json.dumps(step["replays"]) for step in played.notes("step")} == {'{"target": 1, "draft": 0}'}


@pytest.mark.parametrize("scene", [Scene("flashinfer"), LATE, Scene("fa3")], ids=["default", "late", "fa3"])
def test_kinds_of_requests(scene, expected, reference):
    """Mix grammars, penalties and log probabilities in one batch."""
    requests = kinds_of_requests()
    expected.answers(DRAFT, requests)
    with rehearse(scene, DRAFT, NO_CACHE) as played:
        answers = expected.compare(played, DRAFT, requests)
    found, wanted = (
        a[-1]["meta_info"]["output_token_logprobs"] for a in (answers, reference.answers(requests))
    )
    assert [entry[0] for entry in found] == pytest.approx([entry[0] for entry in wanted], abs=1e-4)


@pytest.mark.parametrize("scene", [Scene("flashinfer"), LATE], ids=["default", "late"])
@DFLASH_AND_PEAGLE
def test_mixed_prefill_shared_prefixes_and_retraction(scene, draft, reference):
    """Compare the output only, because block starts depend on timing.

    The pool holds two of four requests. The scheduler admits more, under an estimate of short answers.
    """
    long = [prompt["text"] for prompt in heldout_prompts() if 60 <= prompt["num_tokens"] <= 90][:4]
    sampling = {"temperature": 0, "max_new_tokens": 72, "ignore_eos": True}
    requests = [{"text": text, "sampling_params": sampling} for text in (*long, long[0] + " # again")]
    crowded = "--enable-mixed-chunk", "--chunked-prefill-size", 32, "--max-total-tokens", 384
    with rehearse(scene, draft, *crowded, environment=patched("rehearsal overcommit")) as played:
        answers = played.server.generate_many(requests, 4)
        assert_same(requests, answers, reference.answers(requests))
        assert played.problems() == [] and played.steps_without_graphs() == []
        assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0


@DFLASH_AND_PEAGLE
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


@pytest.mark.parametrize("draft", [DRAFT, DFLASH2_DRAFT, PEAGLE_DRAFT], ids=["dflash", "dflash2", "peagle"])
def test_probabilistic_drafting(draft):
    """Repeat test_sampled_sequences.py with fewer samples."""
    prompt = sequences.PROMPTS[0]
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    wanted = {prompt: sequences.sequence_probs(model, prompt)}
    with rehearse(Scene("flashinfer"), draft, *sequences.PROBABILISTIC) as played:
        counted = {prompt: sequences.sampled_by(played.server, prompt, 288)}
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
    with pytest.raises(ServerDied, match="reads memory that was not kept since the capture"):
        with rehearse(Scene("fa3", fault="forgotten buffer"), DRAFT):
            pass
