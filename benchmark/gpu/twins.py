"""Every Triton kernel and its plain PyTorch twin, on one batch each. Imports no SGLang.

A comparison yields (what the kernel made, what its twin made, tolerance). The tolerance is relative to the
largest value; integers must be equal.
"""

import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from support import kernel_inputs as inputs

from sglang_dflash.kernels.ops.speculative import (
    accept,
    block,
    block_conv,
    copy_ahead,
    peagle_rows,
    penalties,
    rejection,
    selector_walk,
    window,
)
from sglang_dflash.srt.layers import candidate_selector, draft_probs, fp8_head
from sglang_dflash.srt.speculative.acceptance.rejection import REJECTION_RULES, draw_final_tokens
from sglang_dflash.srt.speculative.cycle.layout import VerifyLayout

Pairs = Iterator[tuple[Any, Any, float]]
BS = 3


class Size(NamedTuple):
    """Size of a comparison: of a published model on a GPU, small in Triton's interpreter."""

    device: str
    block: int
    vocabulary: int
    hidden: int
    heads: int
    dtype: torch.dtype  # of states. float32 in the interpreter, which cuts the lower bits off


def sizes(device: str) -> list[Size]:
    published = 151_936, 4096, 8, torch.bfloat16
    rest = published if device == "cuda" else (2100, 64, 2, torch.float32)
    return [Size(device, block_size, *rest) for block_size in (8, 16)]


def compare(pairs: Callable[[Size], Pairs], device: str) -> dict:
    """Compare a kernel with its twin at each size."""
    numbers = 0
    for size in sizes(device):
        for got, want, tolerance in pairs(size):
            for mine, twins in zip(_tensors(got), _tensors(want), strict=True):
                is_exact = not (tolerance and twins.is_floating_point())
                largest = twins.float().nan_to_num(posinf=0, neginf=0).abs().max().item()
                bounds = dict(rtol=0, atol=0) if is_exact else dict(rtol=tolerance, atol=tolerance * largest)
                try:
                    torch.testing.assert_close(mine, twins, equal_nan=True, **bounds)
                except AssertionError as error:
                    return {"verdict": "differs", "block": size.block, "by": " ".join(str(error).split())}
                numbers += twins.numel()
    return {"verdict": "same", "numbers": numbers}


def _tensors(made: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of nested tuples, lists and dataclasses."""
    if isinstance(made, torch.Tensor):
        yield made
    elif dataclasses.is_dataclass(made):
        yield from _tensors([getattr(made, field.name) for field in dataclasses.fields(made)])
    elif isinstance(made, tuple | list):
        for part in made:
            yield from _tensors(part)


def _both(module: Any, name: str, make: Callable[..., Any], *of: Any) -> tuple[Any, Any]:
    """Run kernel and twin on make(*of). Returns their results, and what they may write to."""
    made = []
    for run in (getattr(module, name).__wrapped__, getattr(module, f"{name}_torch")):
        arguments = make(*of)
        made.append((run(*arguments), arguments))
    return made[0], made[1]


def _rounding(dtype: torch.dtype) -> float:
    """Return the tolerance of sums in another order: a step, or several of float32."""
    return torch.finfo(dtype).eps * (16 if dtype == torch.float32 else 1)


def _accept_blocks(size: Size) -> Pairs:
    def make(decides: bool) -> tuple:
        drafted, tokens, *rest = inputs.random_verdicts(1, BS, size.block, size.device)
        rows = torch.arange(BS, device=size.device).flip(0)
        relay = accept.RelayTables(rows, *torch.zeros(2, BS + 4, dtype=torch.int64, device=size.device))
        told = None if decides else accept.accept_matching_prefix(drafted, tokens)
        return told, tokens, *rest, relay, 2**39, drafted if decides else None

    for decides in (True, False):
        yield *_both(accept, "accept_blocks", make, decides), 0


def _prepare_block(size: Size) -> Pairs:
    yield *_both(block, "prepare_block", inputs.random_blocks, 1, BS, size.block, size.device), 0


def _block_offsets(size: Size) -> Pairs:
    for is_ragged in (False, True):
        arguments = 1, BS, size.block, size.device, is_ragged
        yield *_both(block, "block_offsets", inputs.random_lengths, *arguments), 0


def _block_conv(size: Size) -> Pairs:
    """Compare with float32: bfloat16 PyTorch rounds several times, the kernel once."""
    tensors = inputs.random_convolution(BS, size.block, size.hidden, 16, 2, size.dtype)
    tensors = [tensor.to(size.device) for tensor in tensors]
    got = block_conv.block_conv.__wrapped__(*tensors, size.block)
    want = block_conv.block_conv_torch(*(tensor.float() for tensor in tensors), size.block)
    yield got.float(), want, _rounding(size.dtype)


def _write_context_kv(size: Size) -> Pairs:
    accept_len = torch.tensor([size.block - 1, -1, 2], dtype=torch.int32, device=size.device)
    for pool_dtype in (size.dtype, torch.float8_e4m3fn) if size.device == "cuda" else (size.dtype,):
        dtypes = size.dtype, pool_dtype, torch.float32
        context = inputs.Context(1, BS * size.block, 2, size.heads, 128, *dtypes, size.device)
        for options in ({}, {"accept_len": accept_len, "block_size": size.block}):
            # A rounding that differs moves a value to its neighbour.
            yield *context.by_both(**options), _rounding(pool_dtype)


def _find_match(size: Size) -> Pairs:
    history, rows, lengths = inputs.random_texts(1, BS, 3000, 3, size.device)  # two tiles
    got, want = _both(copy_ahead, "find_match", lambda: (history, rows, lengths, 3000))
    yield got[0].amax(dim=1), want[0].amax(dim=1), 0


def _copy_matches(size: Size) -> Pairs:
    history, rows, lengths = inputs.random_texts(1, BS, 3000, 3, size.device)
    keys = copy_ahead.find_match.__wrapped__(history, rows, lengths, 3000)
    yield *_both(copy_ahead, "copy_matches", lambda: (history, rows, lengths, keys, size.block)), 0


def _append_tokens(size: Size) -> Pairs:
    def make() -> tuple:
        texts = inputs.random_texts(1, BS, 40, 9, size.device)
        return *texts, inputs.random_tokens(1, BS, size.block, size.device)

    yield *_both(copy_ahead, "append_tokens", make), 0


def _prepare_rows(size: Size) -> Pairs:
    for last_start in (None, 20):
        arguments = 1, BS, size.block, size.hidden, size.device, last_start
        yield *_both(peagle_rows, "prepare_rows", inputs.random_rows, *arguments), 0


def _append_rows(size: Size) -> Pairs:
    for is_ragged in (False, True):
        arguments = 1, BS, size.block, size.block, size.hidden, size.device, is_ragged
        yield *_both(peagle_rows, "append_rows", inputs.random_appended, *arguments), 0


def _penalize_block(size: Size) -> Pairs:
    for is_ragged in (False, True):
        arguments = 1, BS, size.block, size.vocabulary, size.device, size.dtype, not is_ragged, is_ragged
        yield (
            *_both(penalties, "penalize_block", inputs.random_penalties, *arguments),
            _rounding(size.dtype),
        )


def _count_tokens(size: Size) -> Pairs:
    arguments = 1, BS, size.block, size.vocabulary, size.device
    yield *_both(penalties, "count_tokens", inputs.random_output, *arguments), 0


def _accept_drafts(size: Size) -> Pairs:
    """Compare accepted lengths and final tokens of both rules, for whole blocks and ragged rows."""
    drawn = inputs.random_drawn_blocks(1, BS, size.block, size.vocabulary, 128, size.device)
    tokens, blocks_probs, draft, accept_uniforms, final_uniforms = drawn
    whole = torch.full((BS,), size.block - 1).numpy()
    for rule in REJECTION_RULES:
        for lengths in (whole, whole // torch.arange(1, BS + 1).numpy()):
            layout = VerifyLayout(BS, size.block, lengths, size.device)
            probs = layout.to_rows(blocks_probs)
            arguments = tokens, probs, draft.ids, draft.probs, accept_uniforms, rule, *layout.bounds
            accepted = rejection.accept_drafts_triton(*arguments)
            twins = REJECTION_RULES[rule](tokens, probs, draft, accept_uniforms, layout)
            got, want = (
                draw_final_tokens(tokens, accept_len, probs, weight, draft, final_uniforms, layout)
                for accept_len, weight in (accepted, twins)
            )
            yield got, want, 0


def _walk(size: Size) -> Pairs:
    found, anchors, *books = inputs.random_walk(1, BS, size.block - 1, 16, 256, vocab=2000)
    device, states = size.device, [found.gate, *books]
    gate, *books = (tensor.to(device, size.dtype) for tensor in states)
    found = selector_walk.Candidates(found.ids.to(device), found.unary.to(device), gate)
    draw = inputs.drawing(BS, size.block - 1, 0.8, top_p=0.95)
    draw = selector_walk.DrawInputs(*(tensor.to(device) for tensor in draw))
    for drawn in (None, draw):
        arguments = found, anchors.to(device), *books, drawn
        yield selector_walk.walk_triton(*arguments), candidate_selector.walk_torch(*arguments), 1e-4


def _prepare_window(size: Size) -> Pairs:
    for page in (1, 16):
        arguments = 1, BS, 20, page, 24, size.device
        yield *_both(window, "prepare_window", inputs.random_window, *arguments), 0


def _draw_by_inverse_cdf(size: Size) -> Pairs:
    """Compare with the CPU: this is PyTorch on every device."""
    rng = torch.Generator().manual_seed(1)
    mass, uniforms = torch.rand(BS, size.vocabulary, generator=rng), torch.rand(BS, generator=rng)
    got = draft_probs.draw_by_inverse_cdf(mass.to(size.device), uniforms.to(size.device))
    yield got.cpu(), draft_probs.draw_by_inverse_cdf(mass, uniforms), 0


def _fp8_head(size: Size) -> Pairs:
    """Compare logits with the product of the rounded factors."""
    rng = torch.Generator().manual_seed(1)
    shapes = (2048, size.hidden), (BS * (size.block - 1), size.hidden)
    weight, hidden = (torch.randn(*shape, generator=rng).to(size.device, size.dtype) for shape in shapes)
    columns, rows = (v.float() * scale for v, scale in map(fp8_head.quantize_rows, (weight, hidden)))
    got = fp8_head.Fp8Head(SimpleNamespace(weight=weight))(hidden)
    yield got.float(), rows @ columns.T, _rounding(size.dtype)


TWINS: dict[str, Callable[[Size], Pairs]] = {
    "accept.accept_blocks": _accept_blocks,
    "block.prepare_block": _prepare_block,
    "block.block_offsets": _block_offsets,
    "block_conv.block_conv": _block_conv,
    "context_kv.write_context_kv": _write_context_kv,
    "copy_ahead.find_match": _find_match,
    "copy_ahead.copy_matches": _copy_matches,
    "copy_ahead.append_tokens": _append_tokens,
    "peagle_rows.prepare_rows": _prepare_rows,
    "peagle_rows.append_rows": _append_rows,
    "penalties.penalize_block": _penalize_block,
    "penalties.count_tokens": _count_tokens,
    "rejection.accept_drafts": _accept_drafts,
    "selector_walk.walk": _walk,
    "window.prepare_window": _prepare_window,
    "draft_probs.draw_by_inverse_cdf": _draw_by_inverse_cdf,
    "fp8_head.Fp8Head": _fp8_head,
}
