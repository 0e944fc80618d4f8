"""Penalties count the tokens before each position, those of the block included; answers are the target's
own."""

import math
from types import SimpleNamespace

import pytest
import torch
from conftest import FLOAT32, FLOAT32_TIE, PLAIN_FLOAT32, WIDTHS_CHANGE
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import PEAGLE_DRAFT, TARGET, dflash_arguments, heldout_prompts
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, DynamicCache

from sglang_dflash.srt.speculative.acceptance.greedy import Verdict
from sglang_dflash.srt.speculative.acceptance.penalties import Penalties
from sglang_dflash.srt.speculative.scale_out.disaggregation import Arrival

VOCAB = 12
EOS, STOP = 3, 5
POOL = 6
NEUTRAL = dict(frequency_penalty=0.0, presence_penalty=0.0, repetition_penalty=1.0, min_new_tokens=0)


def request(prompt_len: int, said=(), eos_token_ids=frozenset({EOS}), **penalties) -> SimpleNamespace:
    return SimpleNamespace(
        origin_input_ids=[1] * prompt_len,
        output_ids=list(said),
        eos_token_ids=set(eos_token_ids),
        tokenizer=None,
        sampling_params=SimpleNamespace(**{**NEUTRAL, "stop_token_ids": {STOP}, **penalties}),
    )


def batch_of(reqs, slots, lengths) -> SimpleNamespace:
    """lengths: tokens with KV after a prefill, or before a block."""
    return SimpleNamespace(
        reqs=reqs,
        req_pool_indices=torch.tensor(slots),
        seq_lens=torch.tensor(lengths),
        sampling_info=SimpleNamespace(acc_additive_penalties=torch.zeros(1), acc_scaling_penalties=None),
    )


def penalized(logits: torch.Tensor, req: SimpleNamespace, said: list[int]) -> torch.Tensor:
    """One position, token by token: logits [vocab], after `said`."""
    params, out = req.sampling_params, logits.clone()
    if len(said) < params.min_new_tokens:
        out[list(req.eos_token_ids | params.stop_token_ids)] = -math.inf
    for token in set(said):
        count = said.count(token)
        out[token] -= params.frequency_penalty * count + params.presence_penalty
        out[token] *= params.repetition_penalty if out[token] < 0 else 1 / params.repetition_penalty
    return out


@st.composite
def requests(draw):
    penalties = {
        "frequency_penalty": draw(st.sampled_from([0.0, 0.5, -1.5])),
        "presence_penalty": draw(st.sampled_from([0.0, 0.7, -0.3])),
        "repetition_penalty": draw(st.sampled_from([1.0, 1.3, 0.8])),
        "min_new_tokens": draw(st.sampled_from([0, 1, 4, 9])),
    }
    return request(
        draw(st.integers(1, 5)), draw(st.lists(st.integers(0, VOCAB - 1), max_size=4)), **penalties
    )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_schedule_counts_what_was_said(data):
    """Requests start, run blocks in any company and order, end and leave their slot to others; each
    position's logits are those of the tokens said before it and the drafted ones in between."""
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    penalties, running, width = Penalties(POOL, VOCAB, torch.device("cpu")), {}, data.draw(st.integers(1, 5))

    def logits_of(said: list[list[int]], reqs, penalize) -> None:
        logits = torch.randn(len(said), VOCAB)
        expected = torch.stack([penalized(*row) for row in zip(logits, reqs, said, strict=True)])
        torch.testing.assert_close(penalize(logits.clone()), expected)

    for _ in range(data.draw(st.integers(1, 6))):
        for slot in data.draw(st.lists(st.sampled_from(sorted(running) or [0]), unique=True, max_size=3)):
            running.pop(slot, None)
        free = sorted(set(range(POOL)) - set(running))
        slots = data.draw(st.lists(st.sampled_from(free), unique=True, max_size=3)) if free else []
        new = {slot: (req := data.draw(requests()), list(req.output_ids)) for slot in slots}
        if new:
            # A mixed batch: running ones take part with the token they said last.
            joining = data.draw(st.lists(st.sampled_from(sorted(running) or [-1]), unique=True, max_size=2))
            both = {**new, **{slot: running[slot] for slot in joining if slot in running}}
            reqs, said = zip(*both.values(), strict=True)
            lengths = [len(req.origin_input_ids) + len(tokens) for req, tokens in both.values()]
            batch = batch_of(reqs, list(both), lengths)
            penalties.begin_prefill(batch, num_running=len(both) - len(new))

            def as_sglang(logits, info=batch.sampling_info):
                logits += info.acc_additive_penalties
                return torch.where(
                    logits < 0, logits * info.acc_scaling_penalties, logits / info.acc_scaling_penalties
                )

            logits_of(said, reqs, as_sglang)
            next_tokens = torch.randint(VOCAB, (len(both),))
            penalties.count_prefill(batch, next_tokens)
            for tokens, token in zip(said, next_tokens.tolist(), strict=True):
                tokens.append(token)
            running.update(new)
        if not running:
            continue
        chosen = data.draw(st.permutations(sorted(running)))[: data.draw(st.integers(1, POOL))]
        reqs, said = zip(*(running[slot] for slot in chosen), strict=True)
        lengths = [
            len(req.origin_input_ids) + len(tokens) - 1 for req, tokens in zip(reqs, said, strict=True)
        ]
        batch = batch_of(reqs, chosen, lengths)
        block = torch.randint(VOCAB, (len(chosen), width))
        before = [
            tokens + block[i, 1 : k + 1].tolist() for i, tokens in enumerate(said) for k in range(width)
        ]

        def in_block(logits, batch=batch, block=block):
            penalties.penalize_block(batch, block, logits)
            return logits

        logits_of(before, [req for req in reqs for _ in range(width)], in_block)
        kept = torch.randint(width, (len(chosen),), dtype=torch.int32)
        out = torch.randint(VOCAB, (len(chosen), width))
        penalties.count_block(batch, Verdict(kept, out, out.gather(1, kept.long()[:, None]).squeeze(1)))
        for tokens, row, accept_len in zip(said, out.tolist(), kept.tolist(), strict=True):
            tokens.extend(row[: accept_len + 1])


def test_a_tokenizers_own_end_counts_too():
    req = request(2, min_new_tokens=3)
    req.tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=7)
    batch = batch_of([req], [0], [2])
    Penalties(POOL, VOCAB, torch.device("cpu")).begin_prefill(batch, num_running=0)
    assert batch.sampling_info.acc_additive_penalties[0].isinf().nonzero().flatten().tolist() == [
        EOS,
        STOP,
        7,
    ]


def test_requests_that_another_server_prefilled():
    """A decode server has no prefill of theirs: what they have said comes with them, as after a
    retraction."""
    penalties, device = Penalties(POOL, VOCAB, torch.device("cpu")), torch.device("cpu")
    old = request(2, [3, 3, 4], frequency_penalty=0.5)
    penalties.begin_prefill(batch_of([old], [2], [5]), num_running=0)  # the row's former owner
    reqs = [request(2, frequency_penalty=0.5), request(3, min_new_tokens=2)]
    said = [[5, 6, 5], [7]]
    slots = torch.tensor([2, 1], device=device)
    penalties.join(Arrival(reqs, slots, [4, 3], torch.tensor([5, 7]), said))
    batch = batch_of(reqs, [2, 1], [4, 3])
    logits = torch.randn(2, VOCAB)
    expected = torch.stack([penalized(*row) for row in zip(logits, reqs, said, strict=True)])
    penalties.penalize_block(batch, torch.tensor([[5], [7]]), logits)
    torch.testing.assert_close(logits, expected)


# -- through servers

PENALTIES = (
    {"frequency_penalty": 0.6},
    {"presence_penalty": 1.1},
    {"repetition_penalty": 1.25},
    {"min_new_tokens": 24, "ignore_eos": False, "stop_token_ids": [10, 12]},
    {
        "frequency_penalty": -0.4,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"13": 1.5},
    },
    {},
)


@pytest.fixture(scope="module")
def asked() -> list[dict]:
    texts = [prompt["text"] for prompt in heldout_prompts() if 10 <= prompt["num_tokens"] <= 300][:24]
    length = {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True}
    return [
        {"text": text, "sampling_params": {**length, **PENALTIES[(i + j) % len(PENALTIES)]}}
        for i, text in enumerate(texts)
        for j in range(2)
    ]


@pytest.fixture(scope="module")
def expected(asked) -> list[list[int]]:
    """By Hugging Face, token by token. SGLang is no reference here: under overlap its counts are a token
    behind, as it takes them from the host, and without overlap two of these answers still differ from the
    plain loop's."""
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    return plain_loop(model, tokenizer, asked)


@torch.no_grad()
def plain_loop(model, tokenizer, asked: list[dict]) -> list[list[int]]:
    """What each request says, up to where float32 cannot tell the best two tokens apart. All of them side by
    side."""
    prompts = [tokenizer.encode(one["text"]).ids for one in asked]
    longest = max(map(len, prompts))
    fed = torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts])
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    sayings = [Saying(one["sampling_params"], model.config.eos_token_id) for one in asked]
    while not all(saying.is_over for saying in sayings):
        logits = model(fed, attention_mask=mask, position_ids=positions, past_key_values=cache).logits[:, -1]
        fed = torch.tensor([[saying.go_on(row)] for saying, row in zip(sayings, logits, strict=True)])
        mask = torch.cat((mask, torch.ones_like(fed)), dim=1)
        positions = positions[:, -1:] + 1
    return [saying.said for saying in sayings]


class Saying:
    """One request's answer as it grows."""

    def __init__(self, sampling_params: dict, eos_token_id: int):
        self._params = params = SimpleNamespace(
            **NEUTRAL | {"logit_bias": {}, "stop_token_ids": []} | sampling_params
        )
        self._ends = set() if params.ignore_eos else {eos_token_id, *params.stop_token_ids}
        neutral = {name: getattr(params, name) for name in NEUTRAL}
        self._rule = request(1, eos_token_ids=self._ends, stop_token_ids=set(), **neutral)
        self.said: list[int] = []
        self.is_over = False

    def go_on(self, logits: torch.Tensor) -> int:
        """The next token after these logits; when it is over, any."""
        if self.is_over:
            return 0
        logits = penalized(logits, self._rule, self.said)
        for token, bias in self._params.logit_bias.items():
            logits[int(token)] += bias
        best, second = logits.topk(2).values.tolist()
        if best - second < FLOAT32_TIE:
            self.is_over = True
            return 0
        self.said.append(int(logits.argmax()))
        self.is_over = len(self.said) == self._params.max_new_tokens or self.said[-1] in self._ends
        return self.said[-1]


SERVERS = {
    "plain": dflash_arguments(),
    "chunked and mixed": [*dflash_arguments(), "--chunked-prefill-size", "64", "--enable-mixed-chunk"],
    "widths change": [*dflash_arguments(), *WIDTHS_CHANGE],
    "P-EAGLE, no overlap": [*dflash_arguments(PEAGLE_DRAFT), "--disable-overlap-schedule"],
}


@pytest.mark.server
@pytest.mark.parametrize("flags", SERVERS)
def test_penalized_answers_are_the_targets(flags, servers, asked, expected):
    server = servers.get(*FLOAT32, *SERVERS[flags])
    answers = server.generate_many(asked, 12)
    for one, answer, want in zip(asked, answers, expected, strict=True):
        assert answer["output_ids"][: len(want)] == want, one
    assert sum(map(len, expected)) > 0.95 * sum(len(answer["output_ids"]) for answer in answers)
    lengths = [answer["meta_info"]["spec_accept_length"] for answer in answers]
    assert sum(lengths) / len(lengths) > 1.2, "hardly anything drafted was kept: this shows little"


@pytest.mark.server
def test_penalties_change_these_answers(reference, asked, expected):
    """Or the test above shows nothing."""
    plain = [
        {**one, "sampling_params": {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True}}
        for one in asked
    ]
    pairs = zip(expected, reference.answers(plain), strict=True)
    changed = [penalized != answer["output_ids"] for penalized, answer in pairs]
    assert sum(changed) > 0.6 * len(changed)


@pytest.mark.server
def test_penalties_after_a_retraction(servers, asked):
    """What was said before a request lost its place still counts. SGLang itself forgets it, so this is held
    against the same server with room for all."""
    roomy = servers.get(*FLOAT32, *dflash_arguments())
    long = [
        {**one, "sampling_params": {**one["sampling_params"], "max_new_tokens": 160}} for one in asked[:16]
    ]
    long = [one for one in long if "min_new_tokens" not in one["sampling_params"]]
    expected = roomy.generate_many(long, len(long))
    tight = servers.get(*PLAIN_FLOAT32, *dflash_arguments(), "--max-total-tokens", "2048")
    answers = tight.generate_many(long, len(long))
    assert "etract" in tight.log(), "nothing was retracted"
    assert [answer["output_ids"] for answer in answers] == [answer["output_ids"] for answer in expected]
