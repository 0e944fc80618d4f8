"""SGLang's config parser, able to read speculators checkpoints.

SGLang reads a draft's config in several places before our worker exists, through transformers' AutoConfig, which
rejects a config without a top-level `model_type`.
"""

from sglang.srt.utils.hf_transformers.config import HfModelConfigParser
from transformers import PretrainedConfig, Qwen3Config

from sglang_dflash.srt.configs.draft_config import DraftConfigError
from sglang_dflash.srt.speculative.speculators_format import normalize, served_types, speculators_type


class DraftConfigParser(HfModelConfigParser):
    """Speculators checkpoints we serve, as a Qwen3 config; everything else exactly as SGLang reads it."""

    def parse(self, model, trust_remote_code: bool, revision: str | None = None, **kwargs) -> PretrainedConfig:
        try:
            config, _ = PretrainedConfig.get_config_dict(model, revision=revision)
        except OSError:
            config = {}  # no config.json: SGLang has other formats, or says so
        if speculators_type(config) in served_types():
            flat = normalize(config, str(model))
            try:
                return Qwen3Config(**flat, name_or_path=str(model))
            except (TypeError, ValueError, KeyError, AttributeError) as error:
                problem = f"transformer_layer_config is not a Qwen3 config: {error}"
                raise DraftConfigError(str(model), [problem]) from error
        return super().parse(model, trust_remote_code, revision, **kwargs)
