"""Acceptance measured with both models in plain PyTorch, for `doctor --measure`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_dflash.srt.doctor.interpretations import (
    AS_CONFIGURED,
    Interpretation,
    LikelihoodGain,
    Transcript,
    TranscriptDrafts,
    VerifiedBlock,
    blocks,
    compare,
    draft_everywhere,
    other_interpretations,
)
from sglang_dflash.srt.doctor.pair import BadInput, Checkpoint, Finding, Pair, fault, mask_tokens, note
from sglang_dflash.srt.doctor.plain_drafts import PlainDraft, plain_draft
from sglang_dflash.srt.layers.dequantize import take_quantized_modules

# The evidence rests on two kinds of text. Sampled texts give variety: a small target's greedy text repeats
# itself. Short greedy continuations branch off them, because drafts are trained on greedy text.
SAMPLES_PER_PROMPT, SAMPLE_TOKENS, SAMPLE_TEMPERATURE = 3, 72, 0.7
BRANCH_EVERY, BRANCH_TOKENS = 24, 20
_BATCH = 32
# Standard errors from which a better interpretation is a fault, or a hint, and the least gain that matters.
_CERTAIN, _HINT, _WORTHWHILE = 4.0, 2.5, 0.01
_HOPELESS = 1.15  # accept length at which the draft and the target have nothing to do with each other


@dataclass(frozen=True)
class Acceptance:
    """Acceptance over blocks."""

    length: float  # tokens per block, bonus token included
    by_position: tuple[float, ...]  # share of blocks whose k-th token was accepted

    @classmethod
    def over(cls, texts: Sequence[Transcript], found: Sequence[list[VerifiedBlock]]) -> "Acceptance":
        """Average over the blocks of each text; one that reaches beyond its text is left out."""
        pairs = [(block, text) for text, own in zip(texts, found, strict=True) for block in own]
        whole = [block for block, text in pairs if block.anchor + len(block.tokens) < len(text.tokens)]
        count = max(len(whole), 1)
        return cls(
            1 + sum(block.accepted for block in whole) / count,
            tuple(sum(block.accepted > k for block in whole) / count for k in range(len(pairs[0][0].tokens))),
        )


@dataclass(frozen=True)
class InterpretationResult:
    """One interpretation over all prompts, compared with the checkpoint as configured."""

    interpretation: Interpretation
    acceptance: Acceptance
    evidence: LikelihoodGain


@dataclass(frozen=True)
class Measurement:
    """Everything that was measured."""

    texts: list[Transcript]  # answers to the prompts
    drafts: list[TranscriptDrafts]  # of each text, as configured
    outcomes: list[InterpretationResult]  # of each interpretation; the first is the checkpoint as configured
    observations: int  # positions behind the evidence
    device: str
    decode: Callable[[list[int]], str]

    @property
    def configured(self) -> Acceptance:
        return self.outcomes[0].acceptance

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens in all answers."""
        return sum(len(text.tokens) - text.prompt_length for text in self.texts)

    def pieces(self, tokens: list[int], start: int) -> list[str]:
        """Return the text per token from `start` on; a split character goes to its last token."""
        found, done = [], self.decode(tokens[:start])
        for end in range(start + 1, len(tokens) + 1):
            text = self.decode(tokens[:end])
            if text.endswith("\ufffd") and end < len(tokens):
                found.append("")
                continue
            found.append(text[len(done) :])
            done = text
        return found


@dataclass(frozen=True)
class TargetTranscripts:
    """Texts of the target alone: answers to the prompts, and branches for the evidence."""

    target: Any
    tokenizer: Any
    texts: list[Transcript]
    branches: list[Transcript]


def observe(
    checkpoint: Checkpoint,
    prompts: Sequence[dict[str, Any]],
    max_new_tokens: int,
    device: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> TargetTranscripts:
    """Decode the prompts greedily, and some branches. Raises BadInput."""
    target, tokenizer = load_target(checkpoint, device, dtype)
    prompt_ids = [encode(prompt, tokenizer, checkpoint.name) for prompt in prompts]
    answers = continue_texts(target, prompt_ids, max_new_tokens, 0.0)
    roots = prompt_ids * SAMPLES_PER_PROMPT
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sampled = continue_texts(target, roots, SAMPLE_TOKENS, SAMPLE_TEMPERATURE)
    stubs = [
        ids[:cut]
        for ids, root in zip(sampled, roots, strict=True)
        for cut in range(len(root) + BRANCH_EVERY // 2, len(ids), BRANCH_EVERY)
    ]
    texts = _capture_all(target, answers, prompt_ids)
    branches = _capture_all(target, continue_texts(target, stubs, BRANCH_TOKENS, 0.0), stubs)
    if not texts:
        raise BadInput(
            f"{checkpoint.name}: ends every answer at once, so there is nothing to measure; "
            "take other --prompts"
        )
    return TargetTranscripts(target, tokenizer, texts, branches)


def measure(pair: Pair, observed: TargetTranscripts) -> Measurement:
    """Draft at every position of the target's texts, by every interpretation of the draft."""
    draft = load_draft(pair, observed.target)
    outcomes: list[InterpretationResult] = []
    configured: list[TranscriptDrafts] = []
    for interpretation in (AS_CONFIGURED, *other_interpretations(draft, mask_tokens(pair.target.tokenizer))):
        if observed.texts[0].has_states(interpretation.boundaries(draft.draft.target_layer_ids)):
            acceptance, drafts = draft_texts(draft, observed, interpretation)
            configured = configured or drafts
            outcomes.append(InterpretationResult(interpretation, acceptance, compare(configured, drafts)))
    return Measurement(
        texts=observed.texts,
        drafts=configured[: len(observed.texts)],
        outcomes=outcomes,
        observations=sum(len(d.tokens) for d in configured),
        device=str(observed.target.device),
        decode=observed.tokenizer.decode,
    )


def draft_texts(
    draft: PlainDraft, observed: TargetTranscripts, interpretation: Interpretation
) -> tuple[Acceptance, list[TranscriptDrafts]]:
    """Draft all texts by one interpretation.

    Returns:
        The acceptance over the answers, and the drafts of the answers and of the branches after them.
    """
    drafts = [draft_everywhere(draft, text, interpretation) for text in observed.texts + observed.branches]
    own = [blocks(*text_and_drafts) for text_and_drafts in zip(observed.texts, drafts, strict=False)]
    return Acceptance.over(observed.texts, own), drafts


def findings(measured: Measurement) -> Iterator[Finding]:
    """Judge the figures.

    Only the best of the better interpretations is a fault: they are guesses at one and the same mistake.
    """
    length = measured.configured.length
    better = [o for o in measured.outcomes if o.evidence.gain >= _WORTHWHILE and o.evidence.t >= _HINT]
    if better:
        best = max(better, key=lambda outcome: outcome.evidence.gain)
        problem = (
            f"{best.interpretation.problem}: {best.evidence.gain:.2f} nats a token, {best.evidence.t:.1f} "
            f"standard errors, accept length {best.acceptance.length:.2f} instead of {length:.2f}"
        )
        if best.evidence.t >= _CERTAIN:
            yield fault(problem, best.interpretation.advice)
        else:
            advice = f"Measure with more --prompts; if it stays: {best.interpretation.advice}"
            yield note(f"{problem} (weak evidence)", advice)
    if length < _HOPELESS:
        yield fault(
            f"hardly any drafted token is accepted (accept length {length:.2f}, 1 is none)",
            "Its weights do not belong to this target, or not to its config.json: take the draft made for "
            "this target",
        )


def load_target(checkpoint: Checkpoint, device: str | None, dtype: torch.dtype) -> tuple[Any, Any]:
    """Load the target and its tokenizer, by default on a GPU. Raises BadInput."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    # A hub id is loaded by its name: so far only its descriptions have been fetched.
    source = str(checkpoint.folder) if checkpoint.has_tensors else checkpoint.name
    try:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint.folder)
        target = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).eval().to(device)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        reason = str(error).strip().splitlines()[0]
        raise BadInput(f"{checkpoint.name}: transformers cannot load it: {reason}") from error
    # Of its generation_config.json the stop tokens alone: penalties would make "greedy" another choice.
    target.generation_config = GenerationConfig(eos_token_id=target.generation_config.eos_token_id)
    return target, tokenizer


def load_draft(pair: Pair, target: Any) -> PlainDraft:
    """Load the draft's plain model, in the target's dtype and on its device."""
    config = pair.config
    embedding = target.get_input_embeddings().weight.detach()
    head = target.get_output_embeddings().weight.detach()
    tensors = {name: stored.values[...].to(target.device) for name, stored in pair.draft.tensors.items()}
    weights = {}
    for module in take_quantized_modules(tensors, pair.examined_tensors):
        try:
            weight = module.dequantize(target.device)
        except ValueError as error:
            raise BadInput(f"{pair.draft.name}: {error}") from error
        weights[f"{module.name}.weight"] = weight.to(embedding.dtype)
    for name, tensor in tensors.items():
        weights[name] = tensor.to(embedding.dtype) if tensor.is_floating_point() else tensor
    if not config.has_own_vocabulary:
        weights.pop("d2t", None)
    if pair.mask_embedding is not None:
        weights["mask_embedding"] = pair.mask_embedding.vector.to(embedding)
    # Gemma's modules multiply what they look up.
    scale = float(getattr(target.get_input_embeddings(), "embed_scale", 1.0))
    return plain_draft(
        config,
        hf_config=pair.hf_config,
        weights=weights,
        embedding=embedding,
        head=head,
        target_scale=scale,
        rotary_shares=pair.rotary_shares,
    )


def encode(prompt: dict[str, Any], tokenizer: Any, target: str) -> list[int]:
    if (messages := prompt.get("messages")) is None:
        return tokenizer(prompt["text"]).input_ids or [tokenizer.eos_token_id]
    if not tokenizer.chat_template:
        return tokenizer("\n".join(str(message.get("content", "")) for message in messages)).input_ids
    try:
        named = prompt.get("chat_template_kwargs") or {}
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **named)
    except Exception as error:  # jinja's own, a template's raise_exception among them
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadInput(f"{target}: its chat template refuses a prompt: {reason}") from error
    return tokenizer(text, add_special_tokens=False).input_ids


@torch.no_grad()
def continue_texts(
    target: Any, prompts: Sequence[list[int]], new_tokens: int, temperature: float
) -> list[list[int]]:
    """Return each prompt with at most `new_tokens` new tokens, up to its first stop token."""
    device = target.device
    stops = target.generation_config.eos_token_id
    stops = set(stops if isinstance(stops, list) else [] if stops is None else [stops])
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    found = []
    for start in range(0, len(prompts), _BATCH):
        batch = prompts[start : start + _BATCH]
        width = max(map(len, batch))
        padding = [width - len(prompt) for prompt in batch]
        ids = [[0] * pad + list(prompt) for pad, prompt in zip(padding, batch, strict=True)]
        mask = [[0] * pad + [1] * (width - pad) for pad in padding]
        output = target.generate(
            torch.tensor(ids, device=device),
            attention_mask=torch.tensor(mask, device=device),
            max_new_tokens=new_tokens,
            pad_token_id=next(iter(stops), 0),
            use_cache=True,
            **sampling,
        )
        for prompt, new in zip(batch, output[:, width:].tolist(), strict=True):
            end = next((i for i, token in enumerate(new) if token in stops), len(new) - 1)
            found.append([*prompt, *new[: end + 1]])
    return found


def _capture_all(target: Any, texts: list[list[int]], prompts: Sequence[list[int]]) -> list[Transcript]:
    """Capture the texts that continue their prompts by more than one token."""
    pairs = zip(texts, prompts, strict=True)
    return [capture(target, ids, len(prompt)) for ids, prompt in pairs if len(ids) - len(prompt) > 1]


@torch.no_grad()
def capture(target: Any, ids: list[int], prompt_length: int) -> Transcript:
    """Run one forward over a finished text, for the states of all layers."""
    tokens = torch.tensor(ids, device=target.device)
    before_norm: list[torch.Tensor] = []
    # The last of hidden_states is behind the final norm; the layer's own output is before it.
    final_norm = getattr(target.base_model, "norm", None)
    hook = final_norm and final_norm.register_forward_pre_hook(
        lambda _, inputs: before_norm.append(inputs[0])
    )
    try:
        output = target(tokens[None], output_hidden_states=True, use_cache=False)
    finally:
        if hook:
            hook.remove()
    states = [state[0] for state in output.hidden_states[:-1]] + [before_norm[0][0] if before_norm else None]
    return Transcript(prompt_length, tokens, output.logits[0].argmax(dim=-1), states)
