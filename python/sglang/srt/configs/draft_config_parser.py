"""SGLang's config parser, able to read speculators checkpoints.

SGLang reads a draft's config in several places before our worker exists, through transformers' AutoConfig,
which rejects a config without a top-level `model_type`."""

from collections.abc import Callable

from sglang.srt.utils.hf_transformers.config import HfModelConfigParser
from transformers import PretrainedConfig, Qwen3Config

from sglang_dflash.srt.configs.draft_config import DraftConfigError
from sglang_dflash.srt.configs.layer_fields import layer_problems
from sglang_dflash.srt.configs.peagle_config import is_draft
from sglang_dflash.srt.configs.speculators_format import normalize, served_types, speculators_type


class DraftConfigParser(HfModelConfigParser):
    """Speculators checkpoints we serve, as a Qwen3 config; other drafts of ours with a look at their fields
    before; everything else exactly as SGLang reads it. Raises DraftConfigError for a draft that cannot be
    read."""

    def parse(
        self, model, trust_remote_code: bool, revision: str | None = None, **kwargs
    ) -> PretrainedConfig:
        try:
            config, _ = PretrainedConfig.get_config_dict(model, revision=revision)
        except OSError:
            config = {}  # no config.json: SGLang has other formats, or says so
        checkpoint, read = str(model), super().parse
        if speculators_type(config) in served_types():
            flat = normalize(config, checkpoint)
            _refuse(checkpoint, layer_problems(flat, "transformer_layer_config."))
            return _by_library(checkpoint, lambda: Qwen3Config(**flat, name_or_path=checkpoint))
        if is_draft(config.get("architectures")):
            _refuse(checkpoint, layer_problems(config))
            return _by_library(checkpoint, lambda: read(model, trust_remote_code, revision, **kwargs))
        return read(model, trust_remote_code, revision, **kwargs)


def _refuse(checkpoint: str, problems: list[str]) -> None:
    if problems:
        raise DraftConfigError(checkpoint, problems)


def _by_library(checkpoint: str, read: Callable[[], PretrainedConfig]) -> PretrainedConfig:
    """What `read`, code of transformers' and SGLang's, makes of a config. Both have fields of their own
    beyond those that are checked here, and raise whatever comes of a wrong one."""
    try:
        return read()
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise DraftConfigError(
            checkpoint, [f"config.json cannot be read by transformers: {reason[:500]}"]
        ) from error
