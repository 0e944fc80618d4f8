"""SGLang's config parser, able to read speculators checkpoints.

SGLang reads a draft's config in several places before our worker exists, through transformers' AutoConfig,
which rejects a config without a top-level `model_type`.
"""

from collections.abc import Callable
from typing import Any

from sglang.srt.utils.hf_transformers.config import HfModelConfigParser
from transformers import PretrainedConfig, Qwen3Config

from sglang_dflash.srt.configs.draft_quantization import ATTRIBUTE, find_quantization
from sglang_dflash.srt.configs.flat_peagle import flatten_peagle, is_flat_peagle
from sglang_dflash.srt.configs.layer_fields import layer_problems
from sglang_dflash.srt.configs.peagle_config import ALIASES, is_draft
from sglang_dflash.srt.configs.speculators_format import normalize, served_types, speculators_type
from sglang_dflash.srt.configs.validation import DraftConfigError
from sglang_dflash.srt.environ import DFlashOptions


class DraftConfigParser(HfModelConfigParser):
    """A parser that converts speculators checkpoints, and leaves everything else to SGLang.

    Those that we serve become a Qwen3 config. Raises DraftConfigError for a draft that cannot be read. It
    judges no draft that SGLang's own implementation may serve: every process reads configs, the launcher
    alone decides.
    """

    def parse(
        self, model: Any, trust_remote_code: bool, revision: str | None = None, **kwargs: Any
    ) -> PretrainedConfig:
        """Read the config of `model`, a directory or hub id."""
        try:
            config, _ = PretrainedConfig.get_config_dict(model, revision=revision)
        except OSError:
            config = {}  # no config.json: SGLang has other formats, or reports it
        checkpoint, read = str(model), super().parse
        if speculators_type(config) in served_types():
            flat = normalize(config, checkpoint)
            problems = layer_problems(flat, "transformer_layer_config.")
            draft = _read_checked(
                checkpoint, problems, lambda: Qwen3Config.from_dict(flat, name_or_path=checkpoint)
            )
        elif is_flat_peagle(config, checkpoint):
            eagle = flatten_peagle(config, checkpoint, DFlashOptions.TARGET_LAYERS.get())
            draft = _read_checked(
                checkpoint,
                layer_problems(eagle),
                lambda: Qwen3Config.from_dict(eagle, name_or_path=checkpoint),
            )
        elif is_draft(config.get("architectures")):
            draft = _read_checked(checkpoint, [], lambda: read(model, trust_remote_code, revision, **kwargs))
        else:
            return read(model, trust_remote_code, revision, **kwargs)
        draft.architectures = [ALIASES.get(name, name) for name in draft.architectures or ()]
        setattr(draft, ATTRIBUTE, find_quantization(config, checkpoint, revision))
        return draft


def _read_checked(
    checkpoint: str, problems: list[str], read: Callable[[], PretrainedConfig]
) -> PretrainedConfig:
    """Call `read`, code of transformers' and SGLang's, unless there are problems already.

    Both have fields of their own beyond those that are checked here, and raise any kind of error for a wrong
    one.
    """
    if problems:
        raise DraftConfigError(checkpoint, problems)
    try:
        return read()
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise DraftConfigError(
            checkpoint, [f"config.json cannot be read by transformers: {reason[:500]}"]
        ) from error
