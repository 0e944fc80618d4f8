"""Greedy output of a target with GatedDeltaNet layers is its own, token by token.

The likeliest mistake is to give a request another request's recurrent state. So batches change in every step,
and drafts are known answers with random errors (`Oracle`), which gives long accepts. The target's decays are
set close to one: a trained or random state forgets within a few tokens, and a stale one would hardly show.
"""

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from serving import HYBRID_DFLASH2_DRAFT as DFLASH2_DRAFT
from serving import HYBRID_DRAFT as DRAFT
from serving import HYBRID_PEAGLE_DRAFT as PEAGLE_DRAFT
from serving import HYBRID_TARGET as TARGET
from serving import WHOLE_BLOCKS, dflash_arguments, heldout_prompts
from support.drafts import read_config
from support.families import copy_with_long_memory
from support.parity import FLOAT32_TIE
from support.plain_loop import plain_loop
from support.reference_dflash import ReferenceDFlash
from support.reference_dflash2 import ReferenceDFlash2
from support.reference_peagle import ReferencePEagle
from support.scheduled import Answer, Job, Oracle, run
from support.servers import WIDTHS_CHANGE, patched

pytestmark = pytest.mark.server

# SGLang keeps the convolution's inputs in bf16 for every --dtype.
ENVIRONMENT = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}
FLOAT32 = ("--dtype", "float32", "--random-seed", "7")
POOL = ("--max-total-tokens", "32768")
# The finest grid SGLang allows. Decoding then stores states for the prefix cache, too.
GRID = ("--mamba-track-interval", "64")


@dataclass(frozen=True)
class Configuration:
    """A server setting under test.

    Attributes:
        name: The name of the test case, without the draft's.
        arguments: Server flags.
        draft: "dflash", "dflash2" or "peagle".
        accept_length: Bounds on tokens per cycle, bonus included.
        cached: The prefix cache must hold a prompt that was sent before.
        is_long: Not in every run of the tests.
    """

    name: str
    arguments: tuple[str, ...]
    draft: str = "dflash"
    accept_length: tuple[float, float] = (3.0, 8.0)
    cached: bool = True
    is_long: bool = False

    def case(self):
        name = self.name if self.draft == "dflash" else f"{self.draft}-{self.name}"
        return pytest.param(self, id=name, marks=[pytest.mark.long] * self.is_long)


CONFIGURATIONS = (
    Configuration("default", (*POOL, *GRID)),
    Configuration(
        "own-lengths-chunked-mixed-batches",
        (*POOL, *GRID, *WIDTHS_CHANGE, "--chunked-prefill-size", "128", "--enable-mixed-chunk"),
        accept_length=(2.0, 4.0),
    ),
    # Without overlap scheduling SGLang keeps one state per request, and caches it when the request finishes.
    Configuration("no-overlap", (*POOL, "--disable-overlap-schedule")),
    Configuration(
        "block-16",
        (*POOL, *GRID, "--speculative-num-draft-tokens", "16"),
        accept_length=(3.5, 16.0),
        is_long=True,
    ),
    Configuration(
        "page-16-chunked",
        (*POOL, *GRID, "--page-size", "16", "--chunked-prefill-size", "128"),
        draft="peagle",
    ),
    Configuration("retraction", ("--max-total-tokens", "1000", *GRID), cached=False),
)

DRAFTS = {"dflash": DRAFT, "dflash2": DFLASH2_DRAFT, "peagle": PEAGLE_DRAFT}
# The other drafts in each of DFlash's settings, and DFlash2 in P-EAGLE's.
LONG_CONFIGURATIONS = tuple(
    replace(c, draft=draft, is_long=True)
    for draft in ("dflash2", "peagle")
    for c in CONFIGURATIONS
    if c.draft == "dflash" or (c.draft, draft) == ("peagle", "dflash2")
)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    """The bundled target with decays near one: a state remembers hundreds of tokens."""
    return copy_with_long_memory(TARGET, tmp_path_factory.mktemp("hybrid") / "long-memory")


@dataclass(frozen=True)
class Known:
    """A prompt and the target's own answer to it, as token ids."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@pytest.fixture(scope="module")
def known(target) -> list[Known]:
    """Prompts with the plain target's answers, each up to its first near tie.

    Lengths lie around the chunk length of 64. A third of the prompts share a prefix.
    """
    generator = random.Random(1)
    vocabulary = read_config(TARGET)["vocab_size"]

    def tokens(count):
        return tuple(generator.randrange(5, vocabulary) for _ in range(count))

    shared = tokens(300)
    prompts = []
    for number in range(16):
        prompt = tokens(generator.choice((3, 7, 40, 63, 64, 65, 90, 128, 129, 200, 333)))
        start = shared[: generator.choice((64, 100, 128, 200, 256))] if number % 3 == 0 else ()
        prompts.append(start + prompt)
    jobs = [Job(prompt, generator.choice((9, 30, 70, 140, 200)), logprobs=True) for prompt in prompts]
    [answers] = run(["--model-path", target, *FLOAT32, *POOL], [jobs], environment=ENVIRONMENT)
    cut = [next((i for i, gap in enumerate(a.gaps) if gap < FLOAT32_TIE), len(a.output_ids)) for a in answers]
    decided = sum(cut) / sum(len(a.output_ids) for a in answers)
    assert decided > 0.95, f"float32 decides only {decided:.0%} of the target's tokens"
    return [
        Known(prompt, a.output_ids[:end])
        for prompt, a, end in zip(prompts, answers, cut, strict=True)
        if end >= 2
    ]


def cut_short(known: list[Known], share: float) -> list[tuple[Job, Known]]:
    """Build jobs that end after this share of each answer."""
    return [
        (Job(k.prompt, max(1, int(len(k.answer) * share)), step=number * 2 // 3), k)
        for number, k in enumerate(known)
    ]


def continued(first: list[tuple[Job, Known]]) -> list[tuple[Job, Known]]:
    """Build jobs that send a prompt with the first part of its answer.

    The prefix cache then holds recurrent states that verify forwards wrote.
    """
    found = []
    for job, k in first:
        count = job.max_new_tokens
        if count < len(k.answer):
            rest = Known(k.prompt + k.answer[:count], k.answer[count:])
            found.append((Job(rest.prompt, len(rest.answer), step=job.step), rest))
    return found


def coming_and_going(known: list[Known], count: int) -> list[tuple[Job, Known]]:
    """Build jobs that join and end in nearly every step; abort every sixth."""
    generator = random.Random(2)
    found = []
    for number in range(count):
        k = generator.choice(known)
        length = min(len(k.answer), generator.choice((1, 2, 3, 5, 9, 17, 60, 200)))
        abort = length // 2 if number % 6 == 0 and length > 8 else None
        found.append((Job(k.prompt, length, step=number // 2, abort_after=abort), k))
    return found


def assert_targets_own(case: str, jobs: list[tuple[Job, Known]], answers: list[Answer]) -> None:
    wrong = []
    for number, ((job, k), answer) in enumerate(zip(jobs, answers, strict=True)):
        got, wanted = answer.output_ids, k.answer[: job.max_new_tokens]
        if job.abort_after is not None:
            assert answer.finish_reason == "FINISH_ABORT", f"{case}: {answer}"
            assert len(got) >= job.abort_after
            wanted = wanted[: len(got)]
        if got != wanted:
            pairs = enumerate(zip(got, wanted))
            first = next((i for i, (mine, theirs) in pairs if mine != theirs), min(len(got), len(wanted)))
            wrong.append(
                f"request {number}, prompt of {len(job.input_ids)}: differs from output position {first}"
            )
    assert not wrong, f"{case}: {len(wrong)} of {len(jobs)} answers are not the target's:\n" + "\n".join(
        wrong
    )


@pytest.mark.parametrize("configuration", [c.case() for c in (*CONFIGURATIONS, *LONG_CONFIGURATIONS)])
def test_float32_output_is_the_targets(configuration, target, known):
    first = cut_short(known, 0.6)
    cases = {"at first": first, "continued": continued(first), "again": cut_short(known, 1.0)[::2]}
    if configuration.name == "default":
        cases["coming and going"] = coming_and_going(known, 60)
    oracle = Oracle([k.answer for jobs in cases.values() for _, k in jobs])
    arguments = ["--model-path", target, *FLOAT32, *dflash_arguments(DRAFTS[configuration.draft])]
    environment = ENVIRONMENT
    if configuration.name == "retraction":
        # Under an estimate of short answers the scheduler admits more requests than the pool can finish.
        environment = {**ENVIRONMENT, "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "8"}
    groups = [[job for job, _ in jobs] for jobs in cases.values()]
    answers = run([*arguments, *configuration.arguments], groups, oracle, environment)
    for (case, jobs), found in zip(cases.items(), answers, strict=True):
        assert_targets_own(case, jobs, found)
    everything = [answer for found in answers for answer in found]
    cycles = sum(len(answer.accepted) for answer in everything)
    accept_length = sum(len(a.output_ids) - 1 for a in everything) / cycles
    low, high = configuration.accept_length
    assert low <= accept_length <= high, f"{accept_length:.2f} tokens per cycle"
    if configuration.cached:
        prompts = sum(len(job.input_ids) for job, _ in cases["continued"])
        cached = sum(answer.cached_tokens for answer in answers[1])
        assert cached > 0.6 * prompts, f"{cached} of {prompts} prompt tokens came from the prefix cache"
    if configuration.name == "retraction":
        assert sum(answer.retractions for answer in everything) > 0, (
            "nothing was retracted, so the test proves nothing"
        )


@pytest.mark.parametrize(
    ("method", "draft"),
    [
        pytest.param("greedy", DRAFT, id="greedy"),
        pytest.param("probabilistic", DFLASH2_DRAFT, id="drawn-dflash2"),
        pytest.param("probabilistic", PEAGLE_DRAFT, id="drawn-peagle", marks=pytest.mark.long),
    ],
)
def test_sampled_tokens_have_the_targets_probabilities(method, draft, target, known):
    """Compare log probabilities, in which a wrong state shows at every later token.

    Greedy requests share the batch and stay greedy.
    """
    from transformers import AutoModelForCausalLM

    jobs = []
    for number, k in enumerate(known[:12]):
        sampling = {"temperature": 0.0 if number % 3 == 0 else 1.0}
        jobs.append(Job(k.prompt, min(40, len(k.answer)), step=number, sampling=sampling, logprobs=True))
    arguments = ["--model-path", target, *FLOAT32, *POOL, *GRID, *dflash_arguments(draft)]
    arguments += ["--speculative-draft-sample-method", method]
    [answers] = run(
        arguments, [jobs], Oracle([k.answer for k in known[:12]]) if method == "greedy" else None, ENVIRONMENT
    )
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    for number, (job, answer) in enumerate(zip(jobs, answers, strict=True)):
        if number % 3 == 0:
            assert answer.output_ids == known[number].answer[: job.max_new_tokens]
        text = torch.tensor([[*job.input_ids, *answer.output_ids]])
        with torch.no_grad():
            logits = model(input_ids=text, use_cache=False).logits[0, len(job.input_ids) - 1 : -1]
        want = logits.log_softmax(-1).gather(1, torch.tensor(answer.output_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(answer.logprobs), want, atol=2e-3, rtol=0)


@pytest.mark.parametrize(
    ("folder", "reference", "count"),
    [
        pytest.param(DRAFT, ReferenceDFlash, 4, id="dflash"),
        pytest.param(DFLASH2_DRAFT, ReferenceDFlash2, 4, id="dflash2"),
        pytest.param(PEAGLE_DRAFT, ReferencePEagle, 3, id="peagle"),
        pytest.param(DRAFT, ReferenceDFlash, 100, id="dflash-100", marks=pytest.mark.long),
        pytest.param(DFLASH2_DRAFT, ReferenceDFlash2, 100, id="dflash2-100", marks=pytest.mark.long),
        pytest.param(PEAGLE_DRAFT, ReferencePEagle, 100, id="peagle-100", marks=pytest.mark.long),
    ],
)
def test_every_block_accepts_what_a_plain_loop_accepts(folder, reference, count):
    """The trained pair accepts as many tokens in every block as a plain loop without any cache."""
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    texts = [prompt["text"] for prompt in heldout_prompts()]
    stride = 1 if count == 100 else 8
    prompts = [tuple(tokenizer.encode(text).ids) for text in texts[: count * stride : stride]]
    jobs = [Job(prompt, 48, step=number) for number, prompt in enumerate(prompts)]
    arguments = ["--model-path", TARGET, *FLOAT32, WHOLE_BLOCKS, *POOL, *dflash_arguments(folder)]
    [answers] = run(arguments, [jobs], environment=ENVIRONMENT)
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    draft = reference(
        json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    )
    ties = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        text = [*prompt, *answer.output_ids]
        with torch.no_grad():
            out = model(input_ids=torch.tensor([text]), use_cache=False, output_hidden_states=True)
        best = out.logits[0, len(prompt) - 1 : -1].topk(2, dim=-1)
        wrong = best.indices[:, 0] != torch.tensor(answer.output_ids)
        assert (best.values[wrong, 0] - best.values[wrong, 1] < FLOAT32_TIE).all()
        if wrong.any():  # the loop below would follow another text
            ties += 1
            continue
        expected = plain_loop(model, draft, out.hidden_states, text, len(prompt))
        # The last block may reach past the answer's end, where the loop has no token to compare.
        assert list(answer.accepted[:-1]) == expected[:-1] and answer.accepted[-1] >= expected[-1]
    assert ties <= count // 20


@pytest.mark.rehearsal_full
def test_replay_commits_the_same_states(target, known):
    """ReplaySSM, its Triton kernels interpreted: ids and acceptance are those of copied states.

    Answers cross the grid on which states are kept, and the second group continues from it.
    """
    generator = random.Random(4)
    picked = generator.sample([k for k in known if 40 <= len(k.prompt) < 70 and len(k.answer) > 30], 2)
    first = [(Job(k.prompt, 28, step=2 * number), k) for number, k in enumerate(picked)]
    groups = [[job for job, _ in jobs] for jobs in (first, continued(first))]
    arguments = ["--model-path", target, *FLOAT32, WHOLE_BLOCKS, *POOL, *GRID, *dflash_arguments(DRAFT)]
    copied = run(arguments, groups, environment=ENVIRONMENT)
    replayed = run(
        [*arguments, "--enable-linear-replayssm-spec"],
        groups,
        environment={**ENVIRONMENT, **patched("more_recurrent_targets"), "TRITON_INTERPRET": "1"},
        is_cold=True,
        timeout=1800,
    )
    for one, other in zip(copied, replayed, strict=True):
        assert [answer.output_ids for answer in one] == [answer.output_ids for answer in other]
        assert [answer.accepted for answer in one] == [answer.accepted for answer in other]


def test_starts_without_a_flag(known):
    """Serve in bf16, as shipped, with and without a draft, twice each."""
    jobs = [Job(k.prompt, min(24, len(k.answer)), step=number) for number, k in enumerate(known[:4])]
    for arguments in ([], dflash_arguments(DRAFT)):
        cold, warm = run(["--model-path", TARGET, *arguments], [jobs, jobs])
        assert [len(a.output_ids) for a in cold] == [job.max_new_tokens for job in jobs]
        assert sum(a.cached_tokens for a in warm) > sum(a.cached_tokens for a in cold)
