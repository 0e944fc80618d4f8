"""Qwen3.8-27B's classes with its vision tower and DFlash2 draft, whole and split over two ranks.

On the meta device: no weights, no GPU. test_state_memory.py has the states and KV of this shape.
"""

import json
import math
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from shapes import QWEN3_8_27B
from support.published_shape import write
from support.servers import run_to_end

from sglang_dflash.srt.hardware_backend.cpu import runtime

pytestmark = [
    pytest.mark.server,
    pytest.mark.long,
    pytest.mark.skipif(not runtime.needs_stand_in(), reason="builds SGLang's layers without a GPU"),
]
TARGET, DRAFT = "Qwen3_5ForConditionalGeneration", "DFlash2DraftModel"


def build(folder, world_size: int) -> list[dict]:
    """Return each rank's parameter shapes, by model and name."""
    path = f"import sys; sys.path = {sys.path}; from support.published_shape import run_rank"
    programs = [f"{path}; run_rank({rank}, {world_size}, {str(folder)!r})" for rank in range(world_size)]
    with ThreadPoolExecutor(world_size) as pool:
        for ended in pool.map(lambda program: run_to_end("-c", program), programs):
            assert ended.code == 0, ended.output
    return [json.loads((folder / f"{rank}-of-{world_size}.json").read_text()) for rank in range(world_size)]


def billions(shapes: dict[str, list[int]]) -> float:
    return sum(map(math.prod, shapes.values())) / 1e9


def test_sizes_whole_and_on_two_ranks(tmp_path):
    write(tmp_path)
    [whole] = build(tmp_path, 1)
    tower = {name: shape for name, shape in whole[TARGET].items() if name.startswith("visual.")}
    # What benchmark/state_memory.py counts.
    assert billions(whole[TARGET]) - billions(tower) == pytest.approx(26.9, abs=0.05)
    assert billions(tower) == pytest.approx(0.46, abs=0.01)
    assert billions(whole[DRAFT]) == pytest.approx(1.92, abs=0.01)
    ranks = build(tmp_path, 2)
    assert ranks[0] == ranks[1]
    half = ranks[0]
    assert half[TARGET].keys() == whole[TARGET].keys() and half[DRAFT].keys() == whole[DRAFT].keys()
    assert billions(half[TARGET]) == pytest.approx(billions(whole[TARGET]) / 2, rel=0.01)
    pair = QWEN3_8_27B
    layer = half[DRAFT]["layers.0.self_attn.qkv_proj.weight"]
    heads = pair.draft.num_attention_heads + 2 * pair.draft.num_key_value_heads
    assert layer == [heads // 2 * pair.draft.head_dim, pair.draft.hidden_size]
    # The draft's projection of hidden states, its convolutions and its selector are on every rank.
    split = {name for name, shape in whole[DRAFT].items() if half[DRAFT][name] != shape}
    kept = billions({name: shape for name, shape in half[DRAFT].items() if name not in split})
    print("draft, billions on each of two ranks:", billions(half[DRAFT]), "of which whole:", kept)
    assert billions(half[DRAFT]) == pytest.approx((billions(whole[DRAFT]) - kept) / 2 + kept, rel=1e-6)
    assert not any(".self_attn." in name and "norm" not in name for name in whole[DRAFT].keys() - split)
