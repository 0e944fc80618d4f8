"""SGLang's config parser, able to read speculators checkpoints.

SGLang reads a draft's config in several places before our worker exists, through transformers' AutoConfig,
which rejects a config without a top-level `model_type`.
"""

from functools import partial
from typing import Any

from sglang.srt.utils.hf_transformers.config import HfModelConfigParser
from transformers import PretrainedConfig, Qwen3Config

from sglang_dflash.srt.configs.draft_config import names_sliding_layers
from sglang_dflash.srt.configs.draft_formats import flat_config, is_converted
from sglang_dflash.srt.configs.draft_kinds import ALIASES, config_class
from sglang_dflash.srt.configs.fields import DraftConfigError
from sglang_dflash.srt.configs.json_values import short_repr
from sglang_dflash.srt.configs.layer_fields import MAX_SIZE
from sglang_dflash.srt.configs.quantization import ATTRIBUTE, find_quantization
from sglang_dflash.srt.environ import DFlashOptions


class DraftConfigParser(HfModelConfigParser):
    """A parser that converts speculators checkpoints, and leaves everything else to SGLang.

    Drafts that we serve become a Qwen3 config. Raises DraftConfigError for a draft that cannot be read. It
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
        checkpoint = str(model)
        options = {"trust_remote_code": trust_remote_code, "revision": revision, **kwargs}
        plain = partial(super().parse, model, **options)
        flat, read = config, plain
        if is_converted(config, checkpoint):
            flat = flat_config(config, checkpoint, DFlashOptions.TARGET_LAYERS.get())
            read = partial(Qwen3Config.from_dict, flat, name_or_path=checkpoint)
        elif config_class(config.get("architectures")) is None:
            return plain()
        try:
            draft = read()
        except Exception as error:  # any kind: transformers and SGLang have fields that are not checked here
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:500]
            kind = f"config.json, model_type {short_repr(flat.get('model_type'))}"
            problem = f"{kind}, cannot be read by transformers: {reason}"
            raise DraftConfigError(checkpoint, [problem]) from error
        if read is plain and names_sliding_layers(config.get("layer_types")):
            draft.sliding_window = config.get("sliding_window")  # whatever use_sliding_window says
        draft.architectures = [ALIASES.get(name, name) for name in draft.architectures or ()]
        # SGLang refuses a draft that is shorter than its target, by the first field that names a length. The
        # draft's own field stays as it is.
        draft.max_sequence_length = MAX_SIZE
        setattr(draft, ATTRIBUTE, find_quantization(config, checkpoint, revision))
        return draft
