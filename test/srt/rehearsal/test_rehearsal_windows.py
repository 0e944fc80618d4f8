"""A target with sliding layers, rehearsed with CUDA graphs: `make test ARGS="-m rehearsal_full"`.

gpt-oss: every other layer has a window and separate KV slots, and attention has sinks.
"""

from pathlib import Path

import pytest
import torch
from serving import dflash_arguments
from support.families import VOCAB, write_draft, write_target
from support.parity import assert_same
from support.rehearsal.compare import CHANGING, CONCURRENCY, acceptance, assert_target_graphs, verifying
from support.rehearsal.play import ARGUMENTS, on_cpu, rehearse
from support.rehearsal.stage import Scene

pytestmark = [pytest.mark.server, pytest.mark.rehearsal_full, on_cpu]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> tuple[object, ...]:
    target = write_target("gpt-oss", tmp_path_factory.mktemp("gpt-oss") / "target")
    return (
        "--model-path",
        target.path,
        "--skip-tokenizer-init",
        "--page-size",
        "16",
        "--context-length",
        "256",
    )


@pytest.fixture(scope="module")
def draft(tmp_path_factory) -> Path:
    return write_draft(tmp_path_factory.mktemp("draft") / "draft")


def requests() -> list[dict]:
    """Return prompts shorter and longer than the window of 16.

    Answers have three kinds of tokens, so that copies are accepted now and then.
    """
    generator = torch.Generator().manual_seed(5)
    bias = {str(token): 30.0 for token in (11, 12, 13)}
    sampling = {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True, "logit_bias": bias}
    prompts = [torch.randint(8, VOCAB, (n,), generator=generator).tolist() for n in (5, 17, 40, 60)]
    return [{"input_ids": ids, "sampling_params": sampling} for ids in prompts]


def with_text(answers: list[dict]) -> list[dict]:
    """Add the text that a server without a tokenizer leaves out."""
    return [{**answer, "text": ""} for answer in answers]


@pytest.mark.parametrize("changes", [False, True], ids=["whole blocks", "lengths that change"])
@pytest.mark.parametrize("backend", ["fa3", "trtllm_mha"])
def test_sliding_layers(backend, changes, model, draft, servers, tmp_path):
    scored = [{**request, "return_logprob": True, "top_logprobs_num": 2} for request in requests()]
    wanted = servers.get(*ARGUMENTS, *model).generate_many(scored, CONCURRENCY)
    lengths = verifying(tmp_path, *CHANGING) if changes else ()
    arguments = *model, "--speculative-copy-ahead", *lengths
    on_cpu_path = servers.get(*ARGUMENTS, *dflash_arguments(draft), *arguments)
    own = on_cpu_path.generate_many(requests(), CONCURRENCY)
    with rehearse(Scene(backend), draft, *arguments) as played:
        answers = played.server.generate_many(requests(), CONCURRENCY)
        assert_same(requests(), with_text(answers), with_text(wanted))
        assert sum(map(sum, acceptance(own))) > 0 and sum(map(sum, acceptance(answers))) > 0
        state = assert_target_graphs(played)
        assert state["speculative_copy_ahead"]["accepted_tokens"]["copy"] > 10
        if changes:
            assert state["speculative_width"]["candidates"]
            # On TensorRT-LLM the draft runs on FlashInfer, whose plans wait for lengths.
            assert (played.waits() == []) == (backend == "fa3")
