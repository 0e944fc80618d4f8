"""P-EAGLE drafts with an EAGLE-3 config, as Amazon and NeMo AutoModel name their tensors and fields.

Made from the bundled draft. No published file was at hand: names and fields are those of writers and readers.
"""

import torch
from safetensors.torch import load_file
from serving import PEAGLE_DRAFT
from support.drafts import read_config, write_checkpoint

SOURCE = read_config(PEAGLE_DRAFT)
LAYERS = SOURCE["transformer_layer_config"]
INPUTS = SOURCE["eagle_aux_hidden_state_layer_ids"]
KEPT_PLAIN = ("lm_head.", "mask_hidden", "d2t", "t2d")


def tensors(with_norms: bool = False) -> dict[str, torch.Tensor]:
    """Return the bundled draft's tensors.

    with_norms: of queries and keys, which published drafts lack, and without which this one drafts badly.
    """
    found = load_file(PEAGLE_DRAFT / "model.safetensors")
    if with_norms:
        return found
    return {name: t for name, t in found.items() if not name.endswith(("q_norm.weight", "k_norm.weight"))}


def amazon(folder, with_norms: bool = False, **changes):
    """Write gpt-oss' form: EAGLE-3's names, the mask token as text, layers left to the default."""
    config = {**LAYERS, "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
    config |= {"ptd_token_id": str(SOURCE["mask_token_id"]), "draft_vocab_size": SOURCE["draft_vocab_size"]}
    renamed = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors(with_norms).items()}
    return write_checkpoint(folder, config | changes, renamed)


def nemo(folder, with_norms: bool = False, **changes):
    """Write NeMo's form: most names after `model.`, options in the config."""
    config = {
        **LAYERS,
        "architectures": ["LlamaEagle3DraftModel"],
        "parallel_drafting": True,
        "num_depths": 5,
    }
    config |= {"mask_token_id": SOURCE["mask_token_id"], "draft_vocab_size": SOURCE["draft_vocab_size"]}
    config |= {"norm_before_fc": False, "fc_norm": False, "norm_output": False}
    config |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": INPUTS}}
    renamed = {n if n.startswith(KEPT_PLAIN) else f"model.{n}": t for n, t in tensors(with_norms).items()}
    return write_checkpoint(folder, config | changes, renamed)
