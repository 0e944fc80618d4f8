"""Custom logit processors, thinking budgets and sampling masks give the target's own tokens.

Plain SGLang runs without overlap scheduling, as its processors see the newest token only then.
"""

import json
from types import SimpleNamespace

import dill
import pytest
import torch
from serving import TARGET, dflash_arguments, heldout_prompts
from sglang.srt.sampling.custom_logit_processor import (
    CustomLogitProcessor,
    DeepseekOCRNoRepeatNGramLogitProcessor,
    DisallowedTokensLogitsProcessor,
    ThinkingBudgetLogitProcessor,
)
from support.scheduled import Answer, Job, Oracle, run
from support.servers import FLOAT32, UNCOUNTED, patched
from support.thinking import apply_masks_on_cpu
from tokenizers import Tokenizer

from sglang_dflash.srt.hardware_backend.cpu import runtime
from sglang_dflash.srt.speculative.acceptance.processors import (
    GuardedProcessor,
    RequestAtSlot,
    guard,
    runs_per_slot,
)

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(not runtime.needs_stand_in(), reason="compares token by token, in float32 on a CPU"),
]

NEW = 40
START, END, NEW_LINE = 1, 2, 7  # tokens of chats, which the code model does not write
BUDGETS = (3, 9, 17, 30)  # counted from the thinking token, which begins the prompt's last three tokens
STRICT_BUDGETS = (0, 5, 11, 20)
ENVIRONMENT = {
    **UNCOUNTED,
    **patched("deterministic_on_cpu", "masks_of_draws"),
    "SGLANG_MAX_THINK_TOKENS": "1000",
    "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "1",
}
SERVER = (
    *(
        "--model-path",
        TARGET,
        *FLOAT32,
        "--enable-custom-logit-processor",
        "--enable-deterministic-inference",
    ),
    *("--reasoning-parser", "qwen3", "--enable-strict-thinking"),
)
# A pool that does not hold all requests to their end.
CROWDED = ("--max-total-tokens", "176")


class Thinking(ThinkingBudgetLogitProcessor):
    THINKING_START_TOKEN_ID, THINKING_END_TOKEN_ID, NEW_LINE_TOKEN_ID = START, END, NEW_LINE


class Counting(CustomLogitProcessor):
    """Force a token from one call on: state in the object."""

    def __init__(self):
        self.calls = 0

    def __call__(self, logits, custom_param_list=None):
        self.calls += 1
        if self.calls > 11:
            logits.fill_(float("-inf"))
            logits[:, 9] = 0.0
        return logits


class NewestToken(CustomLogitProcessor):
    """Forbid the newest token: it must be known."""

    def __call__(self, logits, custom_param_list=None):
        for row, params in zip(logits, custom_param_list, strict=True):
            output = params["__req__"].output_ids
            if output:
                row[output[-1]] = float("-inf")
        return logits


class Misbehaving(CustomLogitProcessor):
    """Do what the parameters say, once there is some output."""

    def __call__(self, logits, custom_param_list=None):
        for row, params in enumerate(custom_param_list):
            if len(params["__req__"].output_ids) < params["after"]:
                continue
            if params["does"] == "raise":
                raise KeyError(params["does"])
            if params["does"] == "return nothing":
                return None
            if params["does"] == "narrow":
                return logits[:, :5]
            logits[row] = float(params["does"])
        return logits


def serialized(processor: type) -> str:
    """Serialize a processor by its code, as this module is not importable in a server."""
    module, processor.__module__ = processor.__module__, "__main__"
    try:
        return json.dumps({"callable": dill.dumps(processor, recurse=True).hex()})
    finally:
        processor.__module__ = module


THINKING, COUNTING, NEWEST, MISBEHAVING = map(serialized, (Thinking, Counting, NewestToken, Misbehaving))
DISALLOWED = serialized(DisallowedTokensLogitsProcessor)
GREEDY = {"temperature": 0.0}
SEEDED = {"temperature": 0.9, "top_k": 40, "sampling_seed": 11}
MASKED = {"temperature": 0.9, "top_k": 12, "top_p": 0.95, "sampling_seed": 3}


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    texts = [p["text"] for p in heldout_prompts() if 10 <= p["num_tokens"] <= 60]
    return [tuple(tokenizer.encode(text).ids) for text in texts[:24]]


@pytest.fixture(scope="module")
def groups(prompts) -> list[list[Job]]:
    """Return groups of jobs, each of at most twelve at once."""

    def job(number, sampling, processor=None, **params):
        custom = {"custom_params": params} if params else {}
        return Job(prompts[number], NEW, sampling={**sampling, **custom}, processor=processor)

    def thoughts(number, sampling, budget):
        ids = (*prompts[number], START, *prompts[number][:2])
        custom = {"custom_params": {"thinking_budget": budget}}
        return Job(ids, NEW, sampling={**sampling, **custom}, processor=THINKING)

    budgets = [
        thoughts(2 * number + offset, sampling, budget)
        for number, budget in enumerate(BUDGETS)
        for offset, sampling in enumerate((GREEDY, SEEDED))
    ]
    mixed = [
        job(8, GREEDY),
        job(9, SEEDED),
        job(10, GREEDY, DISALLOWED, token_ids=[8, 9, 10, 11, 12, 13]),
        job(
            *(11, SEEDED, serialized(DeepseekOCRNoRepeatNGramLogitProcessor)),
            **{"ngram_size": 2, "window_size": 30},
        ),
        job(12, GREEDY, COUNTING, a=1),
        job(13, GREEDY, NEWEST, a=1),
        job(14, SEEDED, NEWEST, a=1),
        job(15, GREEDY),
    ]
    strict = [
        Job(
            prompts[16 + number],
            NEW,
            sampling={**(GREEDY, SEEDED)[number % 2], "custom_params": {"thinking_budget": budget}},
            reasons=True,
        )
        for number, budget in enumerate(STRICT_BUDGETS)
    ]
    masks = [
        Job(prompts[20 + number], NEW, sampling=sampling, masks=number < 3)
        for number, sampling in enumerate(
            ({"temperature": 0.0, "top_k": 1}, MASKED, {**MASKED, "min_p": 0.0}, SEEDED)
        )
    ]
    return [budgets + mixed[:4], mixed[4:] + strict, masks]


def serve(arguments, groups, oracle: Oracle | None = None) -> list[list[Answer]]:
    """Serve with DFLASH, or by plain SGLang, which cannot apply masks of thoughts on a CPU."""
    prepare = None if "DFLASH" in arguments else apply_masks_on_cpu
    return run([*SERVER, *arguments], groups, oracle, environment=ENVIRONMENT, prepare=prepare)


@pytest.fixture(scope="module")
def plain(groups) -> list[list[Answer]]:
    return serve(["--disable-overlap-schedule"], groups)


def ids(groups) -> list[list[tuple[int, ...]]]:
    return [[answer.output_ids for answer in group] for group in groups]


def drafts_kept(answer: Answer) -> int:
    return sum(answer.accepted)


@pytest.mark.parametrize(
    "processor, is_stateless", [(THINKING, True), (DISALLOWED, True), (COUNTING, False), (NEWEST, False)]
)
def test_which_processors_run_per_slot(processor, is_stateless):
    class Request(SimpleNamespace):
        pass

    params = SimpleNamespace(custom_params={"token_ids": [1]})
    request = Request(custom_logit_processor=processor, sampling_params=params, vocab_size=9)
    guard(request)
    assert runs_per_slot(request.custom_logit_processor) is is_stateless


def test_the_plain_answers_show_something(plain):
    budgets = plain[0][: 2 * len(BUDGETS)]
    for number, answer in enumerate(budgets):
        at = max(BUDGETS[number // 2] - 2, 0)  # two tokens of the prompt count
        assert END in answer.output_ids[at : at + 2] and END not in answer.output_ids[:at], (at, answer)
    assert set(plain[1][0].output_ids[11:]) == {9}
    end = Tokenizer.from_file(str(TARGET / "tokenizer.json")).encode("</think>").ids
    for budget, answer in zip(STRICT_BUDGETS, plain[1][-len(STRICT_BUDGETS) :], strict=True):
        assert list(answer.output_ids[budget : budget + len(end)]) == end, (budget, answer)


@pytest.mark.parametrize(
    "flags",
    [(), ("--disable-overlap-schedule", "--speculative-num-draft-tokens", "16")],
    ids=["overlap", "no overlap, block 16"],
)
def test_answers_are_plain_sglangs(flags, groups, plain):
    """First by the draft, then by an oracle that errs, so that budgets end inside blocks."""
    arguments = [*flags, *dflash_arguments()]
    drafted = serve(arguments, groups)
    assert ids(drafted) == ids(plain)
    known = [answer.output_ids for group in plain for answer in group]
    oracle = serve(arguments, groups, Oracle(known, error_rate=0.2))
    assert ids(oracle) == ids(plain)
    for answers in (drafted, oracle):
        assert all(drafts_kept(answers[1][number]) == 0 for number in range(3)), "a processor was left out"
    speculating = [*oracle[0], oracle[1][3], *oracle[1][4:]]
    assert all(drafts_kept(answer) > 10 for answer in speculating), list(map(drafts_kept, speculating))
    for wanted, got in zip(plain[2][:3], oracle[2][:3], strict=True):
        assert len(got.masks) == len(wanted.masks) == NEW
        assert [tokens for tokens, _ in got.masks] == [tokens for tokens, _ in wanted.masks]
        assert [value for _, value in got.masks] == pytest.approx(
            [value for _, value in wanted.masks], abs=1e-3
        )


def test_requests_with_processors_are_retracted(groups, plain):
    """Resumed requests go on counting where they were."""
    arguments = [*dflash_arguments(), *CROWDED]
    [answers] = serve(arguments, groups[:1])
    with_processors = [answer for job, answer in zip(groups[0], answers, strict=True) if job.processor]
    assert sum(answer.retractions for answer in with_processors) > 0, "nothing was retracted"
    assert ids([answers]) == ids(plain[:1])


DISALLOWING = [
    {"token_ids": ids} for ids in ([8, 9, 10, 11, 12, 13], [202, 7, 58], list(range(0, 2048, 2)), [])
]
HARMFUL = [
    {"does": does, "after": after}
    for after in (0, 5)
    for does in ("raise", "return nothing", "narrow", "nan", "inf", "-inf")
]


def test_requests_with_other_parameters_or_errors_leave_each_other_alone(prompts):
    """Plain SGLang ends if a batch has two disallowed lists, or an error. So it serves each alone."""

    def job(number, params, processor, sampling=GREEDY):
        return Job(prompts[number], NEW, sampling={**sampling, "custom_params": params}, processor=processor)

    fine = [job(number, params, DISALLOWED) for number, params in enumerate(DISALLOWING)]
    fine += [
        job(4, {"does": "", "after": NEW + 1}, MISBEHAVING),
        job(5, {"token_ids": [9]}, DISALLOWED, SEEDED),
        Job(prompts[6], NEW),
    ]
    wanted = serve(["--disable-overlap-schedule"], [[one] for one in fine])
    harmful = [
        job(7 + number, params, MISBEHAVING, (GREEDY, SEEDED)[number % 2])
        for number, params in enumerate(HARMFUL)
    ]
    everything = job(19, {"token_ids": list(range(2048))}, DISALLOWED, SEEDED)
    outside = job(20, {"token_ids": [2048]}, DISALLOWED)
    known = [group[0].output_ids for group in wanted]
    [answers] = serve(
        dflash_arguments(),
        [[*fine, *harmful, everything, outside]],
        Oracle([*known, *[None] * (len(harmful) + 2)], error_rate=0.2),
    )
    assert ids([answers[: len(fine)]]) == [known]
    for params, answer in zip(HARMFUL, answers[len(fine) :], strict=False):
        assert answer.finish_reason == "FINISH_ABORT", (params, answer)
        assert len(answer.output_ids) == params["after"] + 1, (params, answer)
    assert [answer.finish_reason for answer in answers[-2:]] == ["FINISH_ABORT"] * 2


def test_an_error_at_a_later_slot_shows_if_the_output_gets_there():
    """One slot's error leaves the others' logits as the processor makes them."""

    class AtSlot(CustomLogitProcessor):
        def __call__(self, logits, custom_param_list=None):
            for row, params in enumerate(custom_param_list):
                assert len(params["__req__"].output_ids) != 4
                logits[row, 0] = len(params["__req__"].output_ids)
            return logits

    req = SimpleNamespace(output_ids=[1, 2])
    params = [{"__req__": RequestAtSlot(req, [5] * slot)} for slot in range(1, 4)]
    shaped = GuardedProcessor(AtSlot.to_str(), True).shape(torch.zeros(3, 8), params)[0]
    assert shaped[:, 0].tolist() == [3, pytest.approx(float("nan"), nan_ok=True), 5]
    assert shaped[1].isnan().all() and not shaped[[0, 2]].isnan().any()
