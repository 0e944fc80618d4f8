"""`doctor --measure`: both models in plain PyTorch, a few prompts decoded, and what was accepted of every
block."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_dflash.srt.configs.dflash2_config import DFlash2DraftConfig
from sglang_dflash.srt.doctor.checkpoint import BadInput, Checkpoint
from sglang_dflash.srt.doctor.copies import Cycle, accept_length, cycles
from sglang_dflash.srt.doctor.findings import Finding, fault, note
from sglang_dflash.srt.doctor.plain_drafts import PlainDraft, plain_draft
from sglang_dflash.srt.doctor.readings import (
    AS_CONFIGURED,
    Drafts,
    Evidence,
    Reading,
    Text,
    blocks,
    draft_everywhere,
    evidence,
    other_readings,
)
from sglang_dflash.srt.doctor.static_checks import Pair

# Where the evidence is drawn from: sampled texts, for variety (a small target's greedy text repeats itself),
# and short greedy continuations that branch off them, because greedy text is what drafts are trained on.
SAMPLES_PER_PROMPT, SAMPLE_TOKENS, SAMPLE_TEMPERATURE = 3, 72, 0.7
BRANCH_EVERY, BRANCH_TOKENS = 24, 20
_BATCH = 32
# A better reading is a fault from this many standard errors, a hint from fewer; below the gain it would
# change little.
_CERTAIN, _HINT, _WORTHWHILE = 4.0, 2.5, 0.01
_HOPELESS = 1.15  # accept length at which the draft and the target have nothing to do with each other
_FAR_BELOW = 0.5  # of what a card's accept length has beyond 1


@dataclass(frozen=True)
class Expected:
    """What the checkpoint's own card says. by_position: empty where it does not."""

    accept_length: float
    by_position: tuple[float, ...]


@dataclass(frozen=True)
class Outcome:
    """One reading over all prompts. evidence: against the checkpoint as configured; None for that itself."""

    reading: Reading
    accept_length: float
    by_position: tuple[float, ...]
    evidence: Evidence | None


@dataclass(frozen=True)
class Measurement:
    texts: list[Text]
    drafts: list[Drafts]
    outcomes: list[Outcome]
    left_out: list[Reading]  # readings that name a state nobody has
    expected: Expected | None
    observations: int  # positions that the evidence rests on
    device: str
    decode: Callable[[list[int]], str]
    copies: list[list[Cycle]] | None = None  # of each text, where they were asked for

    @property
    def configured(self) -> Outcome:
        return self.outcomes[0]

    @property
    def with_copies(self) -> tuple[float, float]:
        """Accept length, and the share of blocks that are copied, where copies were asked for."""
        return accept_length(self.copies, self.texts)

    def pieces(self, tokens: list[int], start: int, joined: bool = False) -> list[str]:
        """The text of each token from `start` on. A character made of several tokens goes to its last.
        joined: in one piece."""
        found, done = [], self.decode(tokens[:start])
        for end in [len(tokens)] if joined else range(start + 1, len(tokens) + 1):
            text = self.decode(tokens[:end])
            if text.endswith("\ufffd") and end < len(tokens):
                found.append("")
                continue
            found.append(text[len(done) :])
            done = text
        return found


def expectation(card: str) -> Expected | None:
    """From a model card's table with a column `Accept length`, its last row: by this project's cards, the sum
    of the others."""
    rows = [
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in card.splitlines()
        if line.count("|") > 1
    ]
    for i, header in enumerate(rows):
        names = [name.lower() for name in header]
        if "accept length" not in names:
            continue
        body = [row for row in rows[i + 1 :] if len(row) == len(header)]
        figures = [row for row in body if re.fullmatch(r"\d+(\.\d+)?", row[names.index("accept length")])]
        if not figures:
            return None
        positions = next((k for k, name in enumerate(names) if name.startswith("accepted at position")), None)
        shares = re.findall(r"\d+\.\d+", figures[-1][positions]) if positions is not None else []
        return Expected(float(figures[-1][names.index("accept length")]), tuple(map(float, shares)))
    return None


@dataclass(frozen=True)
class Observed:
    """What the target says, with no draft involved. texts: the answers to the prompts; branches: what the
    evidence rests on besides."""

    target: Any
    tokenizer: Any
    texts: list[Text]
    branches: list[Text]


def observe(
    target_checkpoint: Checkpoint,
    prompts: Sequence[dict[str, Any]],
    max_new_tokens: int,
    device: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Observed:
    """Decode the prompts greedily, and some branches. Raises BadInput for a target that does not load."""
    name = target_checkpoint.name
    target, tokenizer = _load_target(
        target_checkpoint, device or ("cuda" if torch.cuda.is_available() else "cpu"), dtype
    )
    prompt_ids = [_encode(prompt, tokenizer, name) for prompt in prompts]
    answers = list(_continue(target, prompt_ids, max_new_tokens, 0.0))
    roots = prompt_ids * SAMPLES_PER_PROMPT
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sampled = list(_continue(target, roots, SAMPLE_TOKENS, SAMPLE_TEMPERATURE))
    stubs = [
        ids[:cut]
        for ids, root in zip(sampled, roots, strict=True)
        for cut in range(len(root) + BRANCH_EVERY // 2, len(ids), BRANCH_EVERY)
    ]
    branches = list(_continue(target, stubs, BRANCH_TOKENS, 0.0))
    texts, observed = (
        [
            capture(target, ids, len(start))
            for ids, start in zip(whole, starts, strict=True)
            if len(ids) - len(start) > 1
        ]
        for whole, starts in ((answers, prompt_ids), (branches, stubs))
    )
    if not texts:
        raise BadInput(
            f"{name}: ends every answer at once, so there is nothing to measure; take other --prompts"
        )
    return Observed(target, tokenizer, texts, observed)


def measure(pair: Pair, observed: Observed, with_copies: bool = False) -> Measurement:
    """Draft at every position of what the target said, by every reading of the draft's checkpoint."""
    draft = load_draft(pair, observed.target)
    texts, everything = observed.texts, observed.texts + observed.branches
    readings = [
        AS_CONFIGURED,
        *other_readings(draft, pair.target.tokenizer.mask_tokens() if pair.target.tokenizer else {}),
    ]
    possible = [r for r in readings if r.is_possible(draft.draft.target_layer_ids, texts[0].states)]
    drafts = {r.label: [draft_everywhere(draft, text, r) for text in everything] for r in possible}
    configured = drafts[AS_CONFIGURED.label]
    outcomes = [
        Outcome(
            reading,
            *_acceptance(texts, drafts[reading.label][: len(texts)]),
            None if reading is AS_CONFIGURED else evidence(configured, drafts[reading.label]),
        )
        for reading in possible
    ]
    return Measurement(
        texts=texts,
        drafts=configured[: len(texts)],
        outcomes=outcomes,
        left_out=[r for r in readings if r not in possible],
        expected=expectation(pair.draft.card),
        observations=sum(len(d.tokens) for d in configured),
        device=str(observed.target.device),
        decode=observed.tokenizer.decode,
        copies=[cycles(*of_text) for of_text in zip(texts, configured, strict=False)]
        if with_copies
        else None,
    )


def findings(measured: Measurement) -> Iterator[Finding]:
    """What the figures say. Only the best of the better readings is a fault: they are guesses at one and the
    same mistake."""
    figure, expected = measured.configured.accept_length, measured.expected
    better = [o for o in measured.outcomes[1:] if o.evidence.gain >= _WORTHWHILE and o.evidence.t >= _HINT]
    for outcome in sorted(better, key=lambda o: -o.evidence.gain)[:1]:
        said = (
            f"{outcome.reading.what}: {outcome.evidence.gain:.2f} nats a token, {outcome.evidence.t:.1f} standard errors, accept "
            f"length {outcome.accept_length:.2f} for {figure:.2f}"
        )
        if outcome.evidence.t >= _CERTAIN:
            yield fault(said, outcome.reading.what_to_do)
        else:
            yield note(
                f"{said} (weak evidence)",
                f"Measure with more --prompts; if it stays: {outcome.reading.what_to_do}",
            )
    if figure < _HOPELESS:
        yield fault(
            f"hardly anything that the draft says is accepted (accept length {figure:.2f}, 1 is none)",
            "Its weights do not belong to this target, or not to its config.json: take the draft made for this target",
        )
    elif expected and figure - 1 < _FAR_BELOW * (expected.accept_length - 1):
        yield fault(
            f"accept length {figure:.2f} is far below the {expected.accept_length:.2f} of the draft's card",
            "Give --prompts of the kind that the card was measured on, with the chat template; else suspect the target's revision",
        )


def _load_target(checkpoint: Checkpoint, device: str, dtype: torch.dtype) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    # A hub id by its name, where only its descriptions have been fetched so far.
    where = str(checkpoint.folder) if any(checkpoint.folder.glob("*.safetensors")) else checkpoint.name
    try:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint.folder)
        target = AutoModelForCausalLM.from_pretrained(where, dtype=dtype).eval().to(device)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise BadInput(
            f"{checkpoint.name}: transformers cannot load it: {str(error).strip().splitlines()[0]}"
        ) from error
    return target, tokenizer


def load_draft(pair: Pair, target: Any) -> PlainDraft:
    """The draft's plain model, with what it borrows from the loaded target, in its dtype and on its
    device."""
    from safetensors.torch import load_file

    if isinstance(pair.draft_config, DFlash2DraftConfig):
        raise BadInput(
            f"{pair.draft.name}: a DFlash2 draft is examined by its files alone; leave out --measure"
        )
    embedding, head = (
        target.get_input_embeddings().weight.detach(),
        target.get_output_embeddings().weight.detach(),
    )
    weights = {}
    for file in sorted({tensor.file for tensor in pair.draft.tensors.values()}):
        for name, tensor in load_file(file, device=str(target.device)).items():
            weights[name.removeprefix("model.")] = (
                tensor.to(embedding.dtype) if tensor.is_floating_point() else tensor
            )
    if not pair.draft_config.has_own_vocabulary:
        weights.pop("d2t", None)
    return plain_draft(pair.draft_config, pair.hf_config, weights, embedding, head)


def _encode(prompt: dict[str, Any], tokenizer: Any, target: str) -> list[int]:
    if "messages" not in prompt:
        return tokenizer(prompt["text"]).input_ids or [tokenizer.eos_token_id]
    if not tokenizer.chat_template:
        return tokenizer(
            "\n".join(str(message.get("content", "")) for message in prompt["messages"])
        ).input_ids
    try:
        text = tokenizer.apply_chat_template(prompt["messages"], tokenize=False, add_generation_prompt=True)
    except Exception as error:  # jinja's own, a template's raise_exception among them
        raise BadInput(
            f"{target}: its chat template refuses a prompt: {str(error).splitlines()[0]}"
        ) from error
    return tokenizer(text, add_special_tokens=False).input_ids


@torch.no_grad()
def _continue(
    target: Any, prompts: Sequence[list[int]], new_tokens: int, temperature: float
) -> Iterator[list[int]]:
    """Each prompt with up to so many new tokens; ends with the first stop token."""
    device = target.device
    stops = target.generation_config.eos_token_id
    stops = set(stops if isinstance(stops, list) else [] if stops is None else [stops])
    for start in range(0, len(prompts), _BATCH):
        batch = prompts[start : start + _BATCH]
        width = max(map(len, batch))
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in batch], device=device)
        mask = torch.tensor(
            [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch], device=device
        )
        sampling = (
            {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
            if temperature
            else {"do_sample": False}
        )
        output = target.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=new_tokens,
            pad_token_id=next(iter(stops), 0),
            use_cache=True,
            **sampling,
        )
        for prompt, new in zip(batch, output[:, width:].tolist(), strict=True):
            end = next((i for i, token in enumerate(new) if token in stops), len(new) - 1)
            yield [*prompt, *new[: end + 1]]


@torch.no_grad()
def capture(target: Any, ids: list[int], prompt_length: int) -> Text:
    """One forward over a finished text, for the states of all layers."""
    tokens = torch.tensor(ids, device=target.device)
    before_norm: list[torch.Tensor] = []
    final_norm = getattr(
        target.base_model, "norm", None
    )  # by which the last of hidden_states has already gone
    hook = final_norm and final_norm.register_forward_pre_hook(
        lambda _, inputs: before_norm.append(inputs[0])
    )
    try:
        output = target(tokens[None], output_hidden_states=True, use_cache=False)
    finally:
        if hook:
            hook.remove()
    states = [state[0] for state in output.hidden_states[:-1]] + [before_norm[0][0] if before_norm else None]
    return Text(prompt_length, tokens, output.logits[0].argmax(dim=-1), states)


def _acceptance(texts: Sequence[Text], drafts: Sequence[Drafts]) -> tuple[float, tuple[float, ...]]:
    """Accept length, bonus token included, and the share of blocks that kept their k-th token. A block that
    reaches beyond its text does not count: its fate was not seen."""
    kept, width = [], drafts[0].tokens.shape[1]
    for text, drafted in zip(texts, drafts, strict=True):
        kept += [
            count for anchor, block, count in blocks(text, drafted) if anchor + len(block) < len(text.tokens)
        ]
    if not kept:
        return 1.0, (0.0,) * width
    return 1 + sum(kept) / len(kept), tuple(
        sum(count > k for count in kept) / len(kept) for k in range(width)
    )
