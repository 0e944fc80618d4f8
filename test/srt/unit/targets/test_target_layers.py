"""Hidden states that a draft reads: id i names the output of target layer i.

Ids in `target_layer_ids` are 0-based, so id i is Hugging Face's `hidden_states[i + 1]`. The values are
compared, because a shift by one raises no error and only costs acceptance. SGLang's target and Hugging Face's
run the same weights in float32. They agree to 1e-4 of the layer's largest value: rounding of two
implementations adds up in deep layers. A neighbouring layer is off by more than 100 times that.
"""

import pytest
import torch
from serving import TARGET
from sglang.srt.model_executor.model_runner_components.attention_backend_setup import (
    configure_aux_hidden_state_capture,
)
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.qwen3 import Qwen3ForCausalLM
from sglang.srt.utils.hf_transformers_utils import get_config
from support.engine import Pools, build, read_config
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers import LlamaForCausalLM as HuggingFaceLlama

TOLERANCE = 1e-4
SHIFTED = 100 * TOLERANCE
PROMPTS = ([11, 500, 42, 42, 7, 1000, 3], [9], [5, 6, 7, 8, 300, 301, 302, 303, 304, 305, 306])


def capture(sglang_model, hf_config, layer_ids, prompts) -> list[torch.Tensor]:
    """Capture each prompt's states [len(prompt), num_aux, hidden] as SGLang does."""
    configure_aux_hidden_state_capture(
        model=sglang_model,
        eagle_use_aux_hidden_state=False,
        eagle_aux_hidden_state_layer_ids=None,
        dflash_use_aux_hidden_state=True,
        dflash_target_layer_ids=list(layer_ids),
        is_dspark=False,
    )
    pools = Pools(
        len(prompts),
        max(map(len, prompts)),
        layers=hf_config.num_hidden_layers,
        kv_heads=hf_config.num_key_value_heads,
        head_dim=hf_config.head_dim,
    )
    hidden = pools.forward(sglang_model, pools.extend(prompts)).hidden_states
    assert hidden.shape == (sum(map(len, prompts)), len(layer_ids) * hf_config.hidden_size)
    return list(hidden.view(-1, len(layer_ids), hf_config.hidden_size).split([len(p) for p in prompts]))


def hidden_states(hugging_face_model, prompt) -> torch.Tensor:
    """Return [num_layers + 1, len(prompt), hidden]: embedding and layer outputs.

    The last output is normed.
    """
    with torch.no_grad():
        output = hugging_face_model(torch.tensor([prompt]), output_hidden_states=True)
    return torch.cat(output.hidden_states)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest expected value."""
    return ((found - expected).abs().max() / expected.abs().max()).item()


def assert_every_layer(sglang_model, hugging_face_model, hf_config, prompts, layer_ids) -> None:
    captured = capture(sglang_model, hf_config, layer_ids, prompts)
    for prompt, found in zip(prompts, captured, strict=True):
        expected = hidden_states(hugging_face_model, prompt)
        for column, layer_id in enumerate(layer_ids):
            assert distance(found[:, column], expected[layer_id + 1]) <= TOLERANCE, f"layer {layer_id}"
            assert distance(found[:, column], expected[layer_id]) > SHIFTED, (
                f"layer {layer_id}: its input matches as well"
            )
            if layer_id + 2 < len(expected):
                assert distance(found[:, column], expected[layer_id + 2]) > SHIFTED, (
                    f"layer {layer_id}: the next layer matches as well"
                )


@pytest.fixture(scope="module")
def bundled():
    hugging_face_model = AutoModelForCausalLM.from_pretrained(
        TARGET, dtype=torch.float32, attn_implementation="eager"
    )
    hf_config = get_config(str(TARGET), trust_remote_code=False)
    weights = hugging_face_model.eval().state_dict()
    weights.pop("lm_head.weight")  # tied
    return build(Qwen3ForCausalLM, hf_config, iter(weights.items())), hugging_face_model, hf_config


def test_every_layer_of_the_bundled_target(bundled):
    sglang_model, hugging_face_model, hf_config = bundled
    layer_ids = range(hf_config.num_hidden_layers - 1)  # SGLang cannot capture the last one
    assert_every_layer(sglang_model, hugging_face_model, hf_config, PROMPTS, layer_ids)


@pytest.mark.parametrize("layer_ids", [range(5), (0, 3), (4,)])
def test_a_random_llama(layer_ids, tmp_path):
    torch.manual_seed(0)
    hugging_face_model = HuggingFaceLlama(
        LlamaConfig(
            vocab_size=1100,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=6,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=8,
            initializer_range=0.3,
            tie_word_embeddings=False,
            architectures=["LlamaForCausalLM"],
        )
    ).eval()
    hf_config = read_config(hugging_face_model.config.to_dict(), tmp_path)
    sglang_model = build(LlamaForCausalLM, hf_config, iter(hugging_face_model.state_dict().items()))
    assert_every_layer(sglang_model, hugging_face_model, hf_config, PROMPTS, tuple(layer_ids))


def test_the_last_layer_cannot_be_captured(bundled):
    """SGLang silently drops the last layer, so our config parser refuses it."""
    sglang_model, _, hf_config = bundled
    with pytest.raises(AssertionError):
        capture(sglang_model, hf_config, [0, hf_config.num_hidden_layers - 1], PROMPTS)
