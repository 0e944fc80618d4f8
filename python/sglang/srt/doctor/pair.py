"""A draft and its target as the doctor examines them: files, configs, and what it finds.

Every finding comes with advice.
"""

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeGuard

from sglang_dflash.srt.configs.checkpoint import (
    MASK_EMBEDDING_FILE,
    MaskEmbedding,
    StoredTensor,
    read_mask_embedding,
    read_object,
    tensors_of,
    weight_files,
)
from sglang_dflash.srt.configs.draft_config import DFlashDraftConfig
from sglang_dflash.srt.configs.draft_formats import flat_config
from sglang_dflash.srt.configs.draft_kinds import (
    check_draft_fits_target,
    config_class,
    find_mask_token,
    read_draft_config,
)
from sglang_dflash.srt.configs.draft_tensors import ExaminedTensors, canonical_name, examine_tensors
from sglang_dflash.srt.configs.fields import DraftConfigError
from sglang_dflash.srt.configs.quantization import find_quantization, quantization_of
from sglang_dflash.srt.configs.speculators_format import is_served, is_speculators_config, speculators_type

# Files that describe a checkpoint, without its large tensors.
_DESCRIPTIONS = ("*.json", "*.jinja", MASK_EMBEDDING_FILE)


class BadInput(Exception):
    """Input that cannot be examined; the message is the one line that the user sees."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in `folder`, with the user's `name` for it and its config.json as `config`."""

    folder: Path
    name: str
    config: Mapping[str, Any]

    @classmethod
    def open(cls, path: str, with_tensors: bool) -> "Checkpoint":
        """Open a directory, or download the needed files of a hub id. Raises BadInput."""
        folder = Path(os.path.expanduser(path))
        if folder.is_file():
            raise BadInput(f"{path}: a file, where the directory of a checkpoint is needed")
        if not folder.is_dir():
            folder = _download(path, with_tensors)
        try:
            return cls(folder, path, read_object(str(folder / "config.json")))
        except ValueError as error:
            raise BadInput(f"{path}: {error}") from error

    @property
    def has_tensors(self) -> bool:
        with contextlib.suppress(ValueError):
            return bool(weight_files(str(self.folder)))
        return False

    @cached_property
    def stored(self) -> list[tuple[str, StoredTensor]]:
        """Every tensor with its name in the files, where two may have one name. Raises BadInput."""
        try:
            return [*tensors_of(str(self.folder))]
        except ValueError as error:
            raise BadInput(f"{self.name}: {error}") from error

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """Every tensor, by our name of it. Raises BadInput."""
        return {canonical_name(name): stored for name, stored in self.stored}

    @cached_property
    def tokenizer(self) -> Any:
        """The tokens of tokenizer.json, without rules of a model, or None without this file."""
        from transformers import PreTrainedTokenizerFast

        path = self.folder / "tokenizer.json"
        if not path.exists():
            return None
        try:
            return PreTrainedTokenizerFast(tokenizer_file=str(path))
        except Exception as error:  # the reader raises nothing narrower
            raise BadInput(f"{self.name}: tokenizer.json cannot be read: {error}") from error


def mask_tokens(tokenizer: Any) -> dict[int, str]:
    """Return special tokens with `mask` in their name, by id. `tokenizer` may be None."""
    special = {} if tokenizer is None else tokenizer.added_tokens_decoder
    return {i: str(token) for i, token in special.items() if "mask" in str(token).lower()}


def _download(name: str, with_tensors: bool) -> Path:
    """Fetch a hub id's files, from the cache if they are there."""
    if os.path.isabs(name) or name.startswith((".", "~")) or name.count("/") != 1:
        raise BadInput(f"{name}: no such directory")
    from huggingface_hub import snapshot_download

    patterns = [*_DESCRIPTIONS, *(["*.safetensors"] if with_tensors else [])]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (OSError, ValueError) as error:  # bases of all that the hub's client raises
        reason = str(error).splitlines()[0]
        raise BadInput(f"{name}: no such directory, and not from the hub: {reason}") from error


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """Read a file of JSON lines, each with `text` or with chat `messages`. Raises BadInput.

    Chats may have `chat_template_kwargs`, as in a request.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # JSON's strings may hold other separators
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: {error}") from error
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            prompt = json.loads(line)
        except ValueError as error:
            raise BadInput(f"{path}:{number}: not JSON ({error})") from error
        messages = prompt.get("messages") if isinstance(prompt, dict) else ()
        is_chat = isinstance(messages, list) and messages and all(isinstance(one, dict) for one in messages)
        if not (is_chat or (messages is None and isinstance(prompt.get("text"), str))):
            raise BadInput(f'{path}:{number}: a prompt is an object with "text", or with "messages"')
        prompts.append(prompt)
    if not prompts:
        raise BadInput(f"{path}: no prompts in it")
    return prompts


# Code to continue, and questions, for which the chat template is used if the target has one. Questions are
# answered without thinking, as in the training of most published drafts.
PROMPTS = read_prompts(Path(__file__).with_name("prompts.jsonl"))


FAULT, NOTE = "fault", "note"
FETCH_AGAIN = "Fetch the draft again, or take one whose tensors and config.json belong together"
OTHER_TARGET = "Serve the target that the draft was trained for, or a draft that was trained for this one"
OR_OTHER_TARGET = OTHER_TARGET[0].lower() + OTHER_TARGET[1:]
# Advice for a problem of the config, by words of its message; the first match counts.
_CONFIG_ADVICE = (
    (
        "name the last layer",
        "If these ids come from a speculators checkpoint, which counts inputs, subtract one from each",
    ),
    (MASK_EMBEDDING_FILE, FETCH_AGAIN),
    ("leave the target's", OTHER_TARGET),
    ("names layer 0 or less", "If these ids come from a z-lab config, which counts outputs, add one to each"),
    ("ascending", "Put the ids in ascending order, and the columns of fc.weight with them"),
    ("outside the vocabulary", "Set the id of the token that the draft was trained with as mask"),
    ("but the target's", OTHER_TARGET),
)


@dataclass(frozen=True)
class Finding:
    """One finding; problem and advice have no full stop."""

    level: str  # FAULT makes the doctor exit with 1; NOTE may be intended
    problem: str
    advice: str
    is_fatal: bool = False  # whether the draft cannot even be loaded

    def __str__(self) -> str:
        return f"{self.level}: {self.problem}. {self.advice}"


def fault(problem: str, advice: str, is_fatal: bool = False) -> Finding:
    return Finding(FAULT, problem, advice, is_fatal)


def note(problem: str, advice: str) -> Finding:
    return Finding(NOTE, problem, advice)


def _read_flat(draft: Checkpoint, target_layers: int) -> dict[str, Any]:
    """Return the draft's flat Qwen3 config. Raise BadInput or DraftConfigError without one.

    `target_layers` is the target's depth, for a draft that does not name the layers it reads.
    """
    kind = speculators_type(draft.config)
    if is_speculators_config(draft.config) and not is_served(draft.config):
        raise BadInput(f"{draft.name}: a draft of kind {kind!r}; DFlash and P-EAGLE are examined here")
    try:
        return flat_config(draft.config, str(draft.folder), target_layers)
    except DraftConfigError:
        raise
    except ValueError as error:
        raise BadInput(str(error)) from error


def _take_rotary_shares(flat: dict[str, Any]) -> tuple[float, ...]:
    """Return the shares of a head that may be rotated; remove a factor at the top level.

    Such a factor may be copied from the target. SGLang's built-in DFLASH follows it. transformers' Qwen3
    layers, on which drafts are trained, read no factor for RoPE of the default kind, or did in some versions.
    """
    rope = flat.get("rope_scaling") or flat.get("rope_parameters") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if rope.get("rope_dim") is not None or kind != "default":
        return (1.0,)
    top, own = flat.get("partial_rotary_factor"), rope.get("partial_rotary_factor")
    if _is_share(top):
        return flat.pop("partial_rotary_factor"), 1.0
    return (1.0, own) if _is_share(own) else (1.0,)


def _is_share(value: Any) -> TypeGuard[float]:
    """Return whether a value lies strictly between 0 and 1."""
    return isinstance(value, float) and 0 < value < 1


def text_config(target: Checkpoint) -> SimpleNamespace:
    """Return the config of the target's language model. Raises BadInput if there is none."""
    if is_speculators_config(target.config) or config_class(target.config.get("architectures")):
        raise BadInput(f"{target.name}: is a draft; --model-path is the target")
    text = target.config.get("text_config") or target.config
    missing = [name for name in ("hidden_size", "vocab_size", "num_hidden_layers") if name not in text]
    if missing:
        raise BadInput(f"{target.name}: its config.json has no {', '.join(missing)}: not a language model's")
    return SimpleNamespace(**text)


class Pair:
    """A draft and its target.

    Attributes:
        text_config: the config of the target's language model.
        config_faults: what is wrong with the draft's config.
        is_parsed: whether the draft's config could be parsed. Only then has a pair the attributes below.
        config: the draft's config, with the id of its mask token.
        hf_config: its flat Qwen3 config.
        mask_embedding: of the mask token, if the checkpoint stores it separately.
        rotary_shares: the shares of a head that may be rotated: first the one that a server takes.
    """

    config: DFlashDraftConfig
    hf_config: Any
    mask_embedding: MaskEmbedding | None
    rotary_shares: tuple[float, ...]

    def __init__(self, target: Checkpoint, draft: Checkpoint):
        from huggingface_hub.errors import StrictDataclassError
        from transformers import Qwen3Config

        self.target, self.draft = target, draft
        self.text_config = text_config(target)
        self.is_parsed = False
        self.config_faults: list[Finding] = []
        try:
            flat = _read_flat(draft, self.text_config.num_hidden_layers)
            self.rotary_shares = _take_rotary_shares(flat)
            hf_config = Qwen3Config(**flat)
            hf_config.draft_quantization = find_quantization(draft.config, str(draft.folder))
            quantization_of(hf_config, draft.name)  # report its faults
            config = read_draft_config(hf_config, draft.name)
            token = config.mask_token_id
            if token is None:
                token = find_mask_token(config, target.tokenizer, draft.name)
                config = replace(config, mask_token_id=token)
            self.config, self.hf_config, self.is_parsed = config, hf_config, True
            self.mask_embedding = mask = read_mask_embedding(str(draft.folder))
            if mask is not None and (problem := mask.misfit(token, hf_config.hidden_size)):
                raise DraftConfigError(draft.name, [problem])
            check_draft_fits_target(
                config, self.text_config, draft.name, target.config.get("architectures") or ()
            )
        except DraftConfigError as error:
            self.config_faults = [fault(problem, config_advice(problem), True) for problem in error.problems]
        except (TypeError, ValueError, KeyError, AttributeError, StrictDataclassError) as error:
            self.config_faults = [fault(f"config.json is not a Qwen3 draft's: {error}", FETCH_AGAIN, True)]

    @cached_property
    def examined_tensors(self) -> ExaminedTensors:
        """The tensors as a dense draft would have them, with their faults."""
        return examine_tensors(self.hf_config, self.config, self.draft.stored)


def config_advice(problem: str) -> str:
    if "missing" in problem and "num_target_layers" not in problem:
        return FETCH_AGAIN
    matches = (advice for words, advice in _CONFIG_ADVICE if words in problem)
    return next(matches, "Correct it in the draft's config.json")
