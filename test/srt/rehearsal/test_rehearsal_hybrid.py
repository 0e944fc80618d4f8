"""A target with GatedDeltaNet layers, rehearsed with CUDA graphs: `make test ARGS="-m rehearsal_full"`.

Its attention is CUDA's, its recurrence and convolution are the CPU path's. What differs from the CPU path is
what a graph freezes: rows, requests that pad them, states' slots.
"""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from serving import HYBRID_DFLASH2_DRAFT, HYBRID_DRAFT, HYBRID_TARGET, dflash_arguments, heldout_prompts
from shapes import QWEN3_8_27B
from support.families import copy_with_long_memory
from support.parity import assert_same
from support.rehearsal.compare import (
    CHANGING,
    CONCURRENCY,
    NO_CACHE,
    acceptance,
    assert_graphs_of_rows,
    assert_target_graphs,
    cap_lengths,
    greedy_requests,
    requests_across_chunks,
    verifying,
)
from support.rehearsal.play import ARGUMENTS, on_cpu, rehearse
from support.rehearsal.stage import Scene
from support.vision_target import random_picture, write_vision_target
from tokenizers import Tokenizer

pytestmark = [pytest.mark.server, pytest.mark.rehearsal_full, on_cpu]

DRAFTS = {"dflash": HYBRID_DRAFT, "dflash2": HYBRID_DFLASH2_DRAFT}
# SGLang keeps the convolution's inputs in bf16 for every --dtype.
ENVIRONMENT = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}
GRID = ("--mamba-track-interval", "64")


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    """The bundled target with decays near one: a trained state soon forgets, and a stale one hardly shows."""
    return copy_with_long_memory(HYBRID_TARGET, tmp_path_factory.mktemp("hybrid") / "long-memory")


def test_whole_blocks(target, servers):
    requests, model = greedy_requests(), ("--model-path", target, *GRID)
    on_cpu_path = servers.get(
        *ARGUMENTS, *dflash_arguments(HYBRID_DRAFT), NO_CACHE, *model, environment=ENVIRONMENT
    )
    wanted = on_cpu_path.generate_many(requests, CONCURRENCY)
    with rehearse(Scene("fa3"), HYBRID_DRAFT, NO_CACHE, *model, environment=ENVIRONMENT) as played:
        answers = played.server.generate_many(requests, CONCURRENCY)
        assert_same(requests, answers, wanted)
        assert acceptance(answers) == acceptance(wanted)
        assert played.problems() == [] and played.steps_without_graphs() == []
        assert max(step["bs"] for step in played.notes("step")) > 1


@pytest.mark.parametrize(
    ("scene", "draft"),
    [
        (Scene("fa3"), "dflash"),
        (Scene("fa3"), "dflash2"),
        (Scene("trtllm_mha"), "dflash2"),
    ],
    ids=lambda value: getattr(value, "backend", value),
)
def test_own_lengths(scene, draft, target, servers, tmp_path):
    """Verify another number of tokens of each request, none included, with graphs keyed by rows."""
    requests, lengths = greedy_requests(), verifying(tmp_path, 6)
    cap_lengths(requests)
    pages = ("--page-size", "16") if scene.backend == "trtllm_mha" else ()
    arguments = NO_CACHE, *lengths, "--model-path", target, *GRID, *pages
    on_cpu_path = servers.get(
        *ARGUMENTS, *dflash_arguments(DRAFTS[draft]), *arguments, environment=ENVIRONMENT
    )
    wanted = on_cpu_path.generate_many(requests, CONCURRENCY)
    with rehearse(scene, DRAFTS[draft], *arguments, environment=ENVIRONMENT) as played:
        answers = played.server.generate_many(requests, CONCURRENCY)
        assert_same(requests, answers, wanted)
        assert acceptance(answers) == acceptance(wanted)
        assert assert_target_graphs(played)["speculative_width"]["candidates"]
        assert_graphs_of_rows(played)


def test_own_lengths_that_change(target, servers, tmp_path):
    """Another number for each request and cycle, with a prefix cache: output is that of whole blocks."""
    requests, model = requests_across_chunks(), ("--model-path", target, *GRID)
    plain = servers.get(*ARGUMENTS, *model, environment=ENVIRONMENT)
    wanted = plain.generate_many(requests, CONCURRENCY)
    lengths = verifying(tmp_path, *CHANGING)
    with rehearse(Scene("fa3"), HYBRID_DRAFT, *model, *lengths, environment=ENVIRONMENT) as played:
        for _ in range(2):  # the second time from states in the prefix cache
            answers = played.server.generate_many(requests, CONCURRENCY)
            assert_same(requests, answers, wanted)
        assert sum(answer["meta_info"]["cached_tokens"] for answer in answers) > 0
        assert_target_graphs(played)
        assert sum(map(sum, acceptance(answers))) > 0


def requests_with_pictures(image_tokens: tuple[int, int, int]) -> list[dict]:
    """Return a text, two prompts that differ in their picture alone, and one with two pictures.

    image_tokens: ids of a picture in a prompt, the vocabulary's last ones.
    """
    tokenizer = Tokenizer.from_file(str(HYBRID_TARGET / "tokenizer.json"))
    texts = [prompt["text"] for prompt in heldout_prompts() if 90 <= prompt["num_tokens"] <= 110]
    ids = [token for token in tokenizer.encode(texts[0]).ids if token < min(image_tokens)]
    generator = random.Random(6)
    small, large, other = (random_picture(generator, *size) for size in ((2, 3), (6, 8), (6, 8)))
    behind_20 = [*ids[:20], *image_tokens, *ids[20:]]
    behind_5_too = [*ids[:5], *image_tokens, *behind_20[5:]]
    sampling = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
    prompts = (ids, []), (behind_20, [large]), (behind_20, [other]), (behind_5_too, [small, large])
    return [
        {"input_ids": prompt, "sampling_params": sampling} | ({"image_data": pictures} if pictures else {})
        for prompt, pictures in prompts
    ]


def test_pictures(target, servers, tmp_path):
    """The class with a vision tower: chunks through a picture, and blocks whose positions lag behind slots.

    Each request and cycle verifies another number of tokens, from graphs keyed by rows.
    """
    start, end, picture, _ = write_vision_target(tmp_path / "target", target)
    requests = requests_with_pictures((start, picture, end))
    model = ("--model-path", tmp_path / "target", *GRID, "--chunked-prefill-size", "64")
    plain = servers.get(*ARGUMENTS, *model, environment=ENVIRONMENT)
    bodies = [{**request, "return_logprob": True, "top_logprobs_num": 2} for request in requests]
    wanted = plain.generate_many(bodies, CONCURRENCY)
    assert wanted[1]["output_ids"] != wanted[2]["output_ids"], "the picture is unseen"
    lengths = verifying(tmp_path, *CHANGING)
    with rehearse(Scene("fa3"), HYBRID_DFLASH2_DRAFT, *model, *lengths, environment=ENVIRONMENT) as played:
        for _ in range(2):  # the second time from states in the prefix cache
            answers = played.server.generate_many(requests, CONCURRENCY)
            assert_same(requests, answers, wanted)
        assert all(answer["meta_info"]["cached_tokens"] >= 64 for answer in answers)
        assert_target_graphs(played)
        assert sum(map(sum, acceptance(answers))) > 0


def write_narrow_published_pair(folder: Path) -> None:
    """Write the published pair's configs with fewer layers of an eighth of their width.

    Heads, states, windows, block, convolutions, selector and vocabulary are as published.
    """
    narrow = {"hidden_size": 640, "intermediate_size": 2176}
    target = replace(QWEN3_8_27B.target, **narrow, num_hidden_layers=8)
    draft = replace(QWEN3_8_27B.draft, **narrow)
    replace(QWEN3_8_27B, target=target, draft=draft, target_layer_ids=(0, 1, 3, 4, 6)).write(folder)


def test_dummy_weights_of_the_published_pair(servers, tmp_path):
    """The published heads, states, windows and vocabulary fit the graphs, with the CPU path's tokens.

    Half of each block is accepted unseen, so that answers consist of the draft's tokens and the target's.
    SGLang's noise repeats a few tokens: numbers are compared with trained weights, in the tests above.
    """
    write_narrow_published_pair(tmp_path)
    generator = torch.Generator().manual_seed(9)
    vocabulary = QWEN3_8_27B.target.vocab_size
    sampling = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    requests = [
        {"input_ids": torch.randint(vocabulary, (length,), generator=generator).tolist()}
        | {"sampling_params": sampling}
        for length in (5, 63, 130, 200)
    ]
    model = ("--model-path", tmp_path / "target", "--load-format", "dummy", "--skip-tokenizer-init")
    arguments = (*model, NO_CACHE, "--max-mamba-cache-size", "16")
    environment = {
        **ENVIRONMENT,
        "SGLANG_SIMULATE_ACC_LEN": "4",
        "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token",
    }
    draft = tmp_path / "draft"
    on_cpu_path = servers.get(*ARGUMENTS, *dflash_arguments(draft), *arguments, environment=environment)
    wanted = on_cpu_path.generate_many(requests, CONCURRENCY)
    servers.close()  # 3 GB
    with rehearse(Scene("fa3"), draft, *arguments, environment=environment) as played:
        answers = played.server.generate_many(requests, CONCURRENCY)
        assert [answer["output_ids"] for answer in answers] == [answer["output_ids"] for answer in wanted]
        assert acceptance(answers) == acceptance(wanted)
        assert played.problems() == [] and played.steps_without_graphs() == []
    assert len({token for answer in answers for token in answer["output_ids"]}) > 2
