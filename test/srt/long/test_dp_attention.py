"""DP attention (`--enable-dp-attention --enable-dp-lm-head`) on two ranks over loopback.

Ranks have separate requests and run the target's MLPs together. Neither the rank of a request nor the
other rank's work may show in its answer or its cycles.
"""

import contextlib
import re
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from serving import (
    DRAFT,
    HYBRID_DRAFT,
    HYBRID_TARGET,
    PEAGLE_DRAFT,
    TARGET,
    WHOLE_BLOCKS,
    Server,
    dflash_arguments,
)
from support.parity import assert_same
from support.rank_checks import (
    NEARLY_SAME,
    assert_samples,
    cycles,
    mixed_requests,
    output_ids,
    penalized_requests,
    some_prompts,
)
from support.servers import FLOAT32, Reference

from sglang_dflash.srt.arg_groups.support import dp_attention_problems
from sglang_dflash.srt.speculative import idle_rank
from sglang_dflash.srt.speculative.cycle.verify import disable_graphs_if_any_rank_idle
from sglang_dflash.srt.speculative.dflash_utils import check_borrowed_layers
from sglang_dflash.srt.speculative.drafters import build

DP_ATTENTION = ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention", "--enable-dp-lm-head")
UNEVEN = (8, 40, 17, 64)  # lengths: some end long before others
DRAWN = ("--speculative-draft-sample-method", "probabilistic")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return some_prompts()


@pytest.fixture(scope="module")
def dp_attention_arguments() -> list[str]:
    """Arguments with a fixed address: SGLang would choose among the system's ephemeral ports."""
    for first in range(20_000, 30_000, 16):
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for port in range(first, first + 16):
                probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return [*DP_ATTENTION, "--dist-init-addr", f"127.0.0.1:{first}"]
    raise RuntimeError("no 16 free ports in a row")


def serve_staggered(server: Server, requests: list[dict], at_once: int, pause_s: float = 0.12) -> list[dict]:
    """Serve `at_once` at a time, started one by one, so that prompts join running batches."""
    answers: list[Any] = [None] * len(requests)
    room = threading.Semaphore(at_once)

    def ask(number: int) -> None:
        with room:
            answers[number] = server.generate(**requests[number])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(requests))]
    for thread in threads:
        thread.start()
        time.sleep(pause_s if at_once > 1 else 0)
    for thread in threads:
        thread.join()
    return answers


def ranks_that_decoded(log: str) -> set[str]:
    return set(re.findall(r"DP(\d)[^\n]*Decode batch", log))


@pytest.mark.server
@pytest.mark.long
@pytest.mark.parametrize("kind", ["DFlash", "P-EAGLE"])
def test_answers_and_cycles_are_those_of_one_rank(kind, servers, reference, prompts, dp_attention_arguments):
    requests = mixed_requests(prompts, UNEVEN)
    penalized = penalized_requests(prompts)
    draft = PEAGLE_DRAFT if kind == "P-EAGLE" else DRAFT
    arguments = [*FLOAT32, WHOLE_BLOCKS, *dflash_arguments(draft), *DRAWN]
    server = servers.get(*arguments)
    alone, alone_penalized = server.generate_many(requests, 8), server.generate_many(penalized, 8)
    assert_same(requests, alone, reference.answers(requests))

    server = servers.get(*arguments, *dp_attention_arguments)
    assert_answers(server, requests, alone, reference)
    server.flush_cache()
    answers = server.generate_many(penalized, 5)
    assert output_ids(answers) == output_ids(alone_penalized)
    assert_samples(server, prompts)
    assert_abort(server, reference, requests)


@pytest.mark.server
@pytest.mark.long
def test_a_target_with_recurrent_states(servers, prompts, dp_attention_arguments):
    """Each rank has the states of its own requests, and commits them while the other rank may be idle."""
    requests = mixed_requests(prompts, UNEVEN)
    arguments = ["--model-path", HYBRID_TARGET, *FLOAT32, WHOLE_BLOCKS, *dflash_arguments(HYBRID_DRAFT)]
    server = servers.get(*arguments)
    alone, of_one = server.generate_many(requests, 8), Reference(server)
    of_one.answers(requests)  # it remembers them
    server = servers.get(*arguments, *dp_attention_arguments)
    assert_answers(server, requests, alone, of_one)
    assert_abort(server, of_one, requests)


def assert_answers(server: Server, requests: list[dict], alone: list[dict], reference: Reference) -> None:
    """Compare answers and cycles with those of one rank, `alone`, however many requests come at once."""
    for at_once in (1, 3, 8):
        server.flush_cache()
        before = len(server.log())
        few = requests[: 12 if at_once == 1 else len(requests)]
        answers = serve_staggered(server, few, at_once)
        assert_same(few, answers, reference.answers(few))
        expected = cycles(alone[: len(few)])
        assert abs(cycles(answers) - expected) <= max(1, NEARLY_SAME * expected), at_once
        assert ranks_that_decoded(server.log()[before:]) == {"0", "1"}


def assert_abort(server: Server, reference: Reference, requests: list[dict]) -> None:
    """Abort a request while both ranks have some, then the remaining one; no state is left."""
    endless = {"temperature": 0, "max_new_tokens": 4000, "ignore_eos": True}
    cut: dict[str, dict] = {}

    def ask(rid: str) -> None:
        cut[rid] = server.generate(rid=rid, input_ids=requests[0]["input_ids"], sampling_params=endless)

    threads = [threading.Thread(target=ask, args=(rid,)) for rid in ("first", "second", "third")]
    for thread in threads:
        thread.start()
    time.sleep(1)
    for rid, thread in zip(("first", "second", "third"), threads):
        server.post("/abort_request", {"rid": rid})
        thread.join(timeout=30)
        assert cut[rid]["meta_info"]["finish_reason"]["type"] == "abort"
    server.flush_cache()
    assert_same(requests[:8], server.generate_many(requests[:8], 8), reference.answers(requests[:8]))
    server.flush_cache()


# -- refusals


def arguments_of(**changes) -> SimpleNamespace:
    fields = {
        "device": "cpu",
        "tp_size": 2,
        "attn_dp_size": 2,
        "enable_dp_lm_head": True,
        "enable_mixed_chunk": False,
        "model_path": str(TARGET),
        "revision": None,
    }
    return SimpleNamespace(**{**fields, "disaggregation_mode": "null", **changes})


WITHOUT_DP = {"attn_dp_size": 1, "enable_dp_lm_head": False, "enable_mixed_chunk": True}


@pytest.mark.parametrize("changes", [{}, {"device": "cuda", "tp_size": 4}, WITHOUT_DP])
def test_served(changes):
    assert not dp_attention_problems(arguments_of(**changes))


@pytest.mark.parametrize(
    "changes, words, builtin_supports",
    [
        ({"tp_size": 4}, "--tp-size beyond --dp-size on a CPU", False),
    ],
)
def test_not_served_with_dp_attention(changes, words, builtin_supports):
    [finding] = dp_attention_problems(arguments_of(**changes))
    assert words in finding.what and finding.builtin_supports is builtin_supports


def test_a_target_with_a_split_embedding(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    [finding] = dp_attention_problems(arguments_of(model_path=str(tmp_path)))
    assert "LlamaForCausalLM" in finding.what and finding.builtin_supports


def test_all_that_is_not_served_is_named():
    found = dp_attention_problems(arguments_of(enable_mixed_chunk=True, disaggregation_mode="decode"))
    text = " ".join(finding.what for finding in found)
    for words in ("--disaggregation-mode", "--enable-mixed-chunk"):
        assert words in text


# -- the parts


@pytest.mark.parametrize("requests, may_replay", [(None, True), ([2, 1], True), ([2, 0], False)])
def test_no_rank_replays_a_graph_beside_an_idle_one(requests, may_replay):
    forward = SimpleNamespace(original_global_num_tokens_cpu=requests, can_run_decode_cuda_graph=True)
    disable_graphs_if_any_rank_idle(forward)
    assert forward.can_run_decode_cuda_graph == may_replay


@pytest.mark.parametrize("in_prefill", [True, False])
def test_an_idle_rank_takes_part_in_the_others_forward(in_prefill, monkeypatch):
    """It takes their number of rows per request, without sampling and without output."""
    forward = SimpleNamespace(original_global_num_tokens_cpu=[0, 3], can_run_decode_cuda_graph=True)
    monkeypatch.setattr(idle_rank.ForwardBatch, "init_new", lambda batch, runner, **_: forward)
    target_worker = MagicMock(device="cpu")
    batch = SimpleNamespace(is_extend_in_batch=in_prefill, spec_info=None)
    result = idle_rank.run_idle(batch, target_worker, block_size=8)
    target_worker.forward_batch_generation.assert_called_once_with(
        batch=None, forward_batch=forward, is_verify=True
    )
    assert not forward.can_run_decode_cuda_graph
    assert batch.spec_info is None if in_prefill else batch.spec_info.num_tokens_per_req == 8
    empty = result.next_token_ids, result.accept_lens, result.new_seq_lens
    assert not any(tensor.numel() for tensor in (*empty, result.next_draft_input.bonus_tokens))


def layout(tp_group: object | None, attn_tp_size: int = 1) -> SimpleNamespace:
    return SimpleNamespace(tp_group=tp_group, local_dp=tp_group is not None, attn_tp_size=attn_tp_size)


def target(embedding: object, head: object) -> SimpleNamespace:
    return SimpleNamespace(get_input_embeddings=lambda: embedding, lm_head=head)


def test_a_head_split_over_all_ranks_cannot_be_borrowed():
    whole, split = SimpleNamespace(tp_size=1), SimpleNamespace(tp_size=2)
    check_borrowed_layers(layout("two"), target(object(), whole))
    with pytest.raises(ValueError, match="LM head is split over all ranks"):
        check_borrowed_layers(layout("two"), target(whole, split))
    with pytest.raises(ValueError, match="embedding is split over all ranks"):
        check_borrowed_layers(layout("two"), target(split, whole))


@pytest.mark.parametrize("tp_group", ["two", None])
def test_a_drafter_on_fewer_ranks_runs_as_if_they_were_all(tp_group, monkeypatch):
    inner, entered = MagicMock(num_draft_rows=7), []

    @contextlib.contextmanager
    def context(layout):
        entered.append(layout)
        yield

    monkeypatch.setattr(build, "run_as_draft", context)
    monkeypatch.setattr(build, "get_spec", lambda: SimpleNamespace(speculative_draft_attention_backend=None))
    monkeypatch.setattr(build, "drafter_class", lambda model: lambda *_: inner)
    own, methods = layout(tp_group), ("begin_prefill", "prefill", "admit_prefilled", "propose", "commit")
    originals = [getattr(inner, method) for method in methods]
    drafter = build.build_drafter(MagicMock(), target(object(), object()), 4, own)
    assert drafter.num_draft_rows == 7
    for method, original in zip(methods, originals, strict=True):
        getattr(drafter, method)("argument")
        original.assert_called_once_with("argument")
    assert entered == ([own] * 5 if tp_group is not None else [])
