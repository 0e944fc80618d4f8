"""The gate before a swap (`doctor --compare`): two drafts on texts that neither knows.

Both drafts of a target walk over the same answers of it. A new draft passes if its accept length is higher by
`BETTER_BY` standard errors over texts, and not lower than `WORSE_BY` on general texts.
"""

import array
import hashlib
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sglang_dflash.srt.configs.checkpoint import MASK_EMBEDDING_FILE, have_one_mask
from sglang_dflash.srt.configs.json_values import as_object
from sglang_dflash.srt.doctor.interpretations import AS_CONFIGURED, TranscriptDrafts, blocks
from sglang_dflash.srt.doctor.measure import capture, continue_texts, encode, load_draft, load_target
from sglang_dflash.srt.doctor.pair import BadInput, Checkpoint, Pair, read_prompts
from sglang_dflash.srt.doctor.plain_drafts import PlainDraft
from sglang_dflash.srt.observability.record import describe_target

HELD_OUT_ONE_IN = 10
LEAST_TEXTS, MOST_TEXTS = 8, 200
BETTER_BY, WORSE_BY = 2.5, 0.03
_ANCHORS_AT_ONCE = 32


@dataclass(frozen=True)
class Text:
    """A prompt and the target's answer."""

    tokens: Sequence[int]
    prompt_length: int

    @property
    def hash(self) -> int:
        """A number that the prompt's ids decide.

        All of them count. Requests with one system prompt have the same first ids.
        """
        prompt = array.array("q", self.tokens[: self.prompt_length])
        return int.from_bytes(hashlib.sha256(prompt.tobytes()).digest()[:8], "big")

    @property
    def is_held_out(self) -> bool:
        """True if the text belongs to the tenth of a record that no draft is trained on."""
        return self.hash % HELD_OUT_ONE_IN == 0


class Record:
    """The texts of a record: a file, or all files of a folder.

    Attributes:
        texts: of all whole lines.
        target: what names the target, if the first line of a file does.
        skipped: lines that were cut short, or are no row.
    """

    def __init__(self, path: Path):
        """Read a record. Raises BadInput if its files name several targets."""
        self.texts: list[Text] = []
        self.target: Mapping[str, Any] | None = None
        self.skipped = 0
        for file in sorted(path.glob("*.jsonl")) if path.is_dir() else [path]:
            for row in self._rows(file):
                named = as_object(row.get("target"))
                if named and self.target not in (None, named):
                    raise BadInput(f"{file}: records another target than the files before it")
                self.target = named or self.target
                self.texts.append(Text(row["input_ids"], row["loss_mask"].index(1)))

    def _rows(self, file: Path) -> Iterator[dict[str, Any]]:
        for line in file.read_bytes().splitlines():
            try:
                row = json.loads(line)
                ids, mask = row["input_ids"], row["loss_mask"]
                is_row = len(ids) == len(mask) and 0 < mask.index(1) < len(ids) - 1
                is_row = is_row and all(type(token) is int and token >= 0 for token in ids)
                row["input_ids"] = array.array("i", ids) if is_row else ()  # a list takes nine times as much
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
                is_row = False
            if is_row:
                yield row
            else:
                self.skipped += 1

    @staticmethod
    def is_at(path: Path) -> bool:
        """Return whether a path is a record, rather than a file of prompts."""
        if path.is_dir():
            return True
        with path.open("rb") as file:
            return b'"input_ids"' in file.readline()


@dataclass(frozen=True)
class Outcome:
    """Accept lengths of both drafts on the same texts, in the same order."""

    served: list[float]
    new: list[float]
    tokens: int  # of the answers

    @property
    def means(self) -> tuple[float, float]:
        return statistics.mean(self.served), statistics.mean(self.new)

    @property
    def gain(self) -> float:
        """Tokens a cycle by which the new draft is better."""
        return self.means[1] - self.means[0]

    @property
    def error(self) -> float:
        """Standard error of the gain, over texts."""
        gains = [new - served for served, new in zip(self.served, self.new, strict=True)]
        return statistics.stdev(gains) / math.sqrt(len(gains))

    def __str__(self) -> str:
        served, new = self.means
        return (
            f"accept length {served:.3f} -> {new:.3f} ({self.gain / served:+.1%}): {self.gain:+.3f} with a "
            f"standard error of {self.error:.3f}, {len(self.new)} texts, {self.tokens} tokens"
        )

    def as_json(self) -> dict[str, Any]:
        served, new = self.means
        numbers = {"served": served, "new": new, "gain": self.gain, "standard_error": self.error}
        return {**numbers, "texts": len(self.new), "tokens": self.tokens}


def objections(own: Outcome, general: Outcome | None) -> list[str]:
    """Return why the new draft should not be swapped in. Nothing: it passes."""
    found = []
    if not own.gain > BETTER_BY * own.error:
        found.append(f"it is not better by {BETTER_BY} standard errors on these texts")
    if general is not None and -general.gain > WORSE_BY * general.means[0]:
        found.append(f"it is worse by more than {WORSE_BY:.0%} on general texts")
    return found


def in_place_of(served: Pair, new: Pair) -> Pair:
    """Return the new draft's tensors under the served config, as after a weight update.

    An update changes weights alone, so what else the checkpoints say must be equal, but for the block size.

    Raises:
        BadInput: no update can put the new draft in the served one's place.
    """
    for pair in (served, new):
        if pair.config_faults:
            raise BadInput(f"{pair.draft.name}: {pair.config_faults[0].problem}")
    if different := served.config.differences(new.config, but=("block_size", "speculative_tokens")):
        raise BadInput(
            f"{new.draft.name}: a swap changes weights alone, but the configs differ in {different}"
        )
    if not have_one_mask(served.mask_embedding, new.mask_embedding):
        raise BadInput(f"{new.draft.name}: a swap changes weights alone, but {MASK_EMBEDDING_FILE} differs")
    new = Pair(served.target, Checkpoint(new.draft.folder, new.draft.name, served.draft.config))
    found = new.examined_tensors
    if problems := found.problems or [f"{name}: no such tensor" for name in found.unknown]:
        raise BadInput(f"{new.draft.name}: does not load in the served draft's place: {problems[0]}")
    return new


class Gate:
    """The loaded target and both drafts.

    Args:
        served: the pair that is served.
        new: the same target with the draft that may replace the served one.
        max_new_tokens: of each answer to a prompt. Recorded answers are read whole.
        device: of all models. None: a GPU if there is one.
        dtype: of all models.
    """

    def __init__(self, served: Pair, new: Pair, max_new_tokens: int, device: str | None, dtype: torch.dtype):
        new = in_place_of(served, new)
        self._checkpoint, self._max_new_tokens = served.target, max_new_tokens
        self._target, self._tokenizer = load_target(served.target, device, dtype)
        self._vocab_size = served.text_config.vocab_size
        self._drafts = [load_draft(pair, self._target) for pair in (served, new)]
        self.skipped = 0

    def measure(self, path: Path) -> Outcome:
        """Measure both drafts on prompts, or on the held-out tenth of a record. Raises BadInput."""
        found = self._recorded(path) if Record.is_at(path) else self._answered(path)
        texts = [
            *{text.hash: text for text in found}.values()
        ]  # one text a prompt, or the error is too small
        if len(texts) < LEAST_TEXTS:
            raise BadInput(f"{path}: {len(texts)} texts to compare on, and {LEAST_TEXTS} are needed")
        texts = sorted(texts, key=lambda text: text.hash)[:MOST_TEXTS]
        served, new = zip(*map(self._accept_lengths, texts), strict=True)
        answers = sum(len(text.tokens) - text.prompt_length for text in texts)
        return Outcome([*served], [*new], tokens=answers)

    def _recorded(self, path: Path) -> list[Text]:
        record = Record(path)
        self.skipped += record.skipped
        if not record.texts:
            raise BadInput(f"{path}: no request is recorded there")
        wanted = describe_target(self._vocab_size, self._tokenizer)
        for name, value in (record.target or {}).items():
            if value != "" and value != wanted.get(name):
                what = {"chat_template": "chat template"}.get(name, name)
                raise BadInput(
                    f"{path}: is a record of another target than {self._checkpoint.name}: its {what}"
                )
        if max(max(text.tokens) for text in record.texts) >= self._vocab_size:
            raise BadInput(f"{path}: has ids outside the vocabulary of {self._checkpoint.name}")
        return [text for text in record.texts if text.is_held_out]

    def _answered(self, path: Path) -> list[Text]:
        """Let the target answer prompts, greedily."""
        prompts = [encode(prompt, self._tokenizer, self._checkpoint.name) for prompt in read_prompts(path)]
        answers = continue_texts(self._target, prompts[:MOST_TEXTS], self._max_new_tokens, 0.0)
        texts = [Text(ids, len(prompt)) for ids, prompt in zip(answers, prompts, strict=False)]
        return [text for text in texts if len(text.tokens) > text.prompt_length + 1]

    @torch.no_grad()
    def _accept_lengths(self, text: Text) -> list[float]:
        transcript = capture(self._target, [*text.tokens], text.prompt_length)
        return [accept_length(draft, transcript) for draft in self._drafts]


def accept_length(draft: PlainDraft, text: Any) -> float:
    """Return the tokens of a cycle, bonus token included, of a walk over a `Transcript`."""
    states = text.concatenate_states(AS_CONFIGURED.boundaries(draft.draft.target_layer_ids))
    anchors = torch.arange(text.prompt_length, len(text.tokens) - 1, device=text.tokens.device)
    drafted = [
        draft.draft_blocks(text.tokens, states, part).tokens for part in anchors.split(_ANCHORS_AT_ONCE)
    ]
    tokens = torch.cat(drafted)
    walked = blocks(text, TranscriptDrafts(text.prompt_length, tokens=tokens, nll=tokens.new_empty(0)))
    return 1 + statistics.mean(block.accepted for block in walked)


def describe(own: Outcome, general: Outcome | None, against: Sequence[str]) -> str:
    """Return the figures and the verdict as text."""
    lines = [f"own      {own}"]
    lines.append("general  not measured" if general is None else f"general  {general}")
    verdict = f"Do not swap: {', and '.join(against)}." if against else "Swap: the new draft is better."
    return "\n".join((*lines, "", verdict))
