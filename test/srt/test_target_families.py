"""The targets people run, one server each on a tiny random checkpoint of Hugging Face's own classes, in float32.

Each gets the same prompts twice, side by side: drafted by a random draft, of which next to nothing is kept, and by an
oracle that knows the answer and errs in one token of six, so that long accepts happen. Both must give Hugging Face's greedy
ids, and the hidden states the draft was given, of prompts and of verified blocks, must be outputs of the layers it names.
"""

import pytest
import torch
from conftest import FLOAT32, first_difference, patched
from families import FAMILIES, LAYER_IDS, VOCAB, Target, write_draft, write_target
from serving import dflash_arguments

pytestmark = pytest.mark.server

ANSWER = 24
# Shorter and longer than the sliding windows (16) and blocks (8).
LENGTHS = (3, 16, 17, 40, 70)
# Two implementations of one model in float32: logits of order 10 differ by about 1e-5.
TIE = 1e-3


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    found = [torch.randint(8, VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]
    return [*found, torch.randint(8, VOCAB, (38,), generator=generator).tolist()]


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    return write_draft(tmp_path_factory.mktemp("draft") / "draft")


def check_answers(answers: list[dict], expected: list[tuple[list[int], list[float]]]) -> None:
    for number, (answer, (ids, leads)) in enumerate(zip(answers, expected, strict=True)):
        undecided = next((i for i, lead in enumerate(leads) if lead < TIE), len(ids))
        assert undecided > 10, "the checkpoint hardly decides between tokens"
        position = first_difference(answer["output_ids"][:undecided], ids[:undecided])
        assert position is None, f"prompt {number} differs at {position}: {answer['output_ids']}, wanted {ids}"


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, relative to the largest expected value."""
    return ((found - expected).abs().max() / expected.abs().max()).item()


def check_captures(target: Target, ids: list[int], dumps) -> None:
    positions, hidden = (torch.cat(parts) for parts in zip(*(torch.load(path) for path in dumps)))
    assert set(range(len(ids) - 1)) <= set(positions.tolist())
    hidden = hidden.view(len(positions), len(LAYER_IDS), -1)
    expected = target.hidden_states(ids)
    inside = positions < len(ids) - 1
    positions, hidden = positions[inside], hidden[inside]
    for column, layer in enumerate(LAYER_IDS):
        assert distance(hidden[:, column], expected[layer + 1, positions]) < target.family.tolerance, f"layer {layer}"
        for other in (layer, layer + 2):  # the layer's input, and the next one's output
            assert distance(hidden[:, column], expected[other, positions]) > 0.3


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family(name, draft, servers, tmp_path):
    target = write_target(name, tmp_path / name)
    expected = [target.answer(prompt, ANSWER) for prompt in prompts()]
    server = servers.get(
        "--model-path", target.path, *dflash_arguments(draft), *FLOAT32, "--skip-tokenizer-init", environment=patched("oracle")
    )
    greedy = {"temperature": 0, "max_new_tokens": ANSWER, "ignore_eos": True}
    dumped = len(LENGTHS)  # asked once, or its beginning would come from the cache and not be captured again
    requests, wanted = [], []
    for number, (prompt, (ids, leads)) in enumerate(zip(prompts(), expected)):
        custom = [{"answer": ids, "dump": str(tmp_path)}] if number == dumped else [{}, {"answer": ids}]
        for one in custom:
            requests.append({"input_ids": prompt, "sampling_params": {**greedy, "custom_params": one}})
            wanted.append((ids, leads))
    answers = server.generate_many(requests, concurrency=8)
    check_answers(answers, wanted)
    meta = [a["meta_info"] for a, r in zip(answers, requests) if r["sampling_params"]["custom_params"]]
    tokens, blocks = (sum(one[key] for one in meta) for key in ("completion_tokens", "spec_verify_ct"))
    assert tokens / blocks > 3, "the oracle's drafts were not kept"
    check_captures(target, prompts()[dumped] + expected[dumped][0], sorted(tmp_path.glob("*.pt")))
