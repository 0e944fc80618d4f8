"""Whole sampled sequences have the target's probabilities, by a chi-square test.

Two tokens are allowed at every position, so the probability of each sequence of LENGTH tokens can be
computed. A scheduler then samples 16,000 tokens, with `-m long` 32,000, and the sequences are counted.
test_sampled_requests.py tests each token given its prefix; this test covers their joint distribution.

Target and drafts are random and have a vocabulary of eight tokens, so that random drafts are often right. The
probabilities come from Hugging Face's model. A right sampler fails once in 1 / FALSE_ALARM runs. One that
misstates its draft's probabilities must fail.
"""

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from serving import TARGET, WHOLE_BLOCKS, dflash_arguments
from support.copy_watch import Outcomes
from support.families import (
    write_deepseek_draft,
    write_dflash2_draft,
    write_draft,
    write_peagle_draft,
    write_target,
)
from support.scheduled import Answer, Job, run
from support.sequence_probs import (
    FALSE_ALARM,
    LENGTH,
    PROBABILISTIC,
    PROMPTS,
    SAMPLES,
    VOCABULARY,
    Probs,
    p_value,
    pooled,
    sequence_probs,
)
from support.servers import COPIES, PLAIN_FLOAT32, UNCOUNTED, WIDTHS_CHANGE, patched

pytestmark = pytest.mark.server

FLAGS = (
    *PLAIN_FLOAT32,
    *("--random-seed", "7", "--max-total-tokens", "16384", "--max-running-requests", "256"),
)

# name -> draft, and the other flags
DRAFTING = {
    "one-hot": ("dflash", (WHOLE_BLOCKS,)),
    "probabilistic": ("dflash", (*PROBABILISTIC, WHOLE_BLOCKS)),  # of the negative control
    "probabilistic, copy ahead, widths change": ("dflash", (*PROBABILISTIC, *WIDTHS_CHANGE, *COPIES)),
    "probabilistic, DFlash2, widths change": ("dflash2", (*PROBABILISTIC, *WIDTHS_CHANGE)),
    "probabilistic, P-EAGLE, block verification": (
        "peagle",
        (*PROBABILISTIC, WHOLE_BLOCKS, "--speculative-use-block-verification"),
    ),
    "probabilistic, DeepSeek's block of 7": ("deepseek", (*PROBABILISTIC, WHOLE_BLOCKS)),
}
LONG = ("probabilistic, DeepSeek's block of 7",)
ONE_PROMPT = PROMPTS[:1]  # enough to notice a draft that lies
assert SAMPLES * len(PROMPTS) * LENGTH > 30_000


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    """Folder with a target and its drafts."""
    folder = tmp_path_factory.mktemp("eight-tokens")
    write_target("qwen2", folder / "target", vocab_size=VOCABULARY)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TARGET / name, folder / "target")
    write_draft(folder / "dflash", VOCABULARY)
    write_deepseek_draft(folder / "deepseek", VOCABULARY)
    write_dflash2_draft(folder / "dflash2", VOCABULARY)
    write_peagle_draft(folder / "peagle", VOCABULARY, VOCABULARY // 2)
    return folder


@pytest.fixture(scope="module")
def expected(checkpoints) -> dict[tuple[int, ...], Probs]:
    """Map each prompt to the probability of every sequence of LENGTH tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoints / "target", dtype=torch.float32).eval()
    return {prompt: sequence_probs(model, prompt) for prompt in PROMPTS}


def test_rare_sequences_are_counted_together():
    assert pooled([(1, 3.0), (2, 2.0), (9, 20.0), (0, 4.0)]) == [(3, 9.0), (9, 20.0)]


def sample(
    checkpoints: Path, drafting: str, prompts: Sequence[tuple[int, ...]], *patches: str, prepare=None
) -> dict[tuple[int, ...], Counter]:
    """Return how often each sequence was sampled after each prompt."""
    draft, flags = DRAFTING[drafting]
    pair = "--model-path", checkpoints / "target", *dflash_arguments(checkpoints / draft)
    job = {"max_new_tokens": LENGTH, "sampling": {"temperature": 1.0, "top_k": 2}}
    groups = [[Job(prompt, **job) for _ in range(SAMPLES)] for prompt in prompts]
    environment = UNCOUNTED | patched(*patches)
    answers = run([*pair, *FLAGS, *flags], groups, environment=environment, prepare=prepare)
    assert_drafts_are_kept(sum(answers, []))
    counts = [Counter(answer.output_ids for answer in group) for group in answers]
    assert all(count.total() == SAMPLES for count in counts)
    return dict(zip(prompts, counts, strict=True))


def assert_drafts_are_kept(answers: Sequence[Answer]) -> None:
    cycles = sum(len(answer.accepted) for answer in answers)
    assert LENGTH * len(answers) > 1.2 * cycles, "the test shows little: hardly a drafted token was accepted"


@pytest.mark.parametrize("prompts", [ONE_PROMPT, pytest.param(PROMPTS, marks=pytest.mark.long)], ids=len)
@pytest.mark.parametrize(
    "drafting",
    [
        pytest.param(name, marks=[pytest.mark.long] if name in LONG else [])
        for name in DRAFTING
        if name != "probabilistic"
    ],
)
def test_sequences_have_the_targets_probabilities(drafting, prompts, checkpoints, expected, tmp_path):
    copies = "copy ahead" in drafting
    # Without this patch texts of eight tokens would have too few matches.
    eager = ["eager_copies"] if copies else []
    outcomes = Outcomes(tmp_path / "outcomes") if copies else None
    found = p_value(sample(checkpoints, drafting, prompts, *eager, prepare=outcomes), expected)
    assert found > FALSE_ALARM, f"not the target's distribution, p = {found:.2g}"
    if copies:
        kept = json.loads(outcomes.path.read_text())["accepted_tokens"]
        assert min(kept["copy"], kept["draft"]) > 300, f"shows little of copies beside drafts: {kept}"


def test_misdeclared_draft_probabilities_are_noticed(checkpoints, expected):
    """Negative control: drafted tokens come from another distribution than declared."""
    counted = sample(checkpoints, "probabilistic", ONE_PROMPT, "misdeclared_draft")
    found = p_value(counted, expected)
    assert found < FALSE_ALARM, f"a draft that lies about its probabilities passes, p = {found:.2g}"
