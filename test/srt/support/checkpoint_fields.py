"""Valid speculators config.json files, and copies of them with one field changed."""

import copy
from pathlib import Path

from serving import PEAGLE_DRAFT, SPECULATORS_DRAFT
from support.drafts import read_config


def _bundled(draft: Path) -> dict:
    """Return the config that speculators 0.9.0 wrote for a bundled draft, whose layers all slide."""
    config = read_config(draft) | {"draft_vocab_size": 1024}
    config["speculators_config"]["verifier"]["name_or_path"] = "some/target"
    config["transformer_layer_config"] |= {"num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2}
    return config


GOOD, GOOD_PEAGLE = _bundled(SPECULATORS_DRAFT), _bundled(PEAGLE_DRAFT)
GOOD_DFLASH2 = {
    **{key: value for key, value in GOOD.items() if key != "sliding_window_non_causal"},
    "architectures": ["DFlash2DraftModel"],
    "conv_group_size": 16,
    "conv_kernel_size": 2,
    "draft_vocab_size": 2048,
    "selector_rank": 32,
    "selector_top_k": 8,
    "speculators_config": GOOD["speculators_config"] | {"algorithm": "dflash2"},
    "speculators_model_type": "dflash2",
}


def changed(path: str, value=None, *, remove: bool = False, base: dict = GOOD) -> dict:
    """Return a good config with one field, named by a dotted path, changed or removed."""
    config = copy.deepcopy(base)
    *parents, last = path.split(".")
    owner = config
    for key in parents:
        owner = owner[int(key)] if isinstance(owner, list) else owner[key]
    if remove:
        del owner[last]
    else:
        owner[last] = value
    return config
