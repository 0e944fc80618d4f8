"""Reordered weights: products, memory, the tied head, weight updates, and what stays plain."""

from types import SimpleNamespace

import pytest
import sglang  # noqa: F401  loads our platform plugin before any of SGLang's modules
import torch
from serving import DRAFT, TARGET
from sglang.srt.layers.linear import QKVParallelLinear, ReplicatedLinear
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.runtime_context import get_observability
from support.draft_cases import lm_head
from support.engine import start
from support.weight_updates import Pair, tensors_of
from torch import nn

from sglang_dflash.srt.hardware_backend.cpu import dense_forward, reordering, speedups
from sglang_dflash.srt.hardware_backend.cpu.reordering import ReorderedHeadMethod, reorder
from sglang_dflash.srt.layers.plain_weight import is_reordered, plain_weight
from sglang_dflash.srt.layers.vocab_argmax import largest_logits

pytestmark = pytest.mark.skipif(
    not speedups.multiplies_bfloat16(), reason="this CPU does not multiply bfloat16"
)


def linear(kind, dtype=torch.bfloat16, bias=True):
    """Return a layer of 48 inputs and 96 outputs with random weights."""
    start()
    generator = torch.Generator().manual_seed(0)
    sizes = (48, 96) if kind is ReplicatedLinear else (48, 16, 4, 1)
    layer = kind(*sizes, bias=bias, params_dtype=dtype)
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype)
    return layer


@pytest.mark.parametrize("rows", [0, 1, 8, 33])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", [QKVParallelLinear, ReplicatedLinear])
def test_the_product_is_pytorchs(kind, bias, rows):
    layer = linear(kind, bias=bias)
    x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(1)).bfloat16()[:, ::2]
    exact = nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
    reorder(layer)
    assert is_reordered(layer)
    found = layer(x)[0]
    assert found.dtype == torch.bfloat16
    # Half a unit in the last place, and the order of float32 additions.
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-4)


def test_the_plain_copy_goes_where_only_products_read_it():
    for kind, is_kept in ((QKVParallelLinear, False), (ReplicatedLinear, True)):
        layer = linear(kind)
        weight, loader = layer.weight.data.clone(), layer.weight.weight_loader
        reorder(layer)
        assert (layer.weight.shape, layer.weight.dtype) == (weight.shape, weight.dtype)
        assert layer.weight.weight_loader == loader
        assert torch.equal(plain_weight(layer), weight)
        assert layer.weight.untyped_storage().nbytes() == (weight.nbytes if is_kept else 2)
        # Who reads a weight that is gone gets no values that could pass for it.
        assert torch.equal(layer.weight, weight) if is_kept else layer.weight.isnan().all()


def test_what_stays_plain(monkeypatch):
    """Other dtypes and methods, convolutions, views, servers with LoRA, CPUs that multiply no bfloat16."""

    class Quantized(UnquantizedLinearMethod):
        pass

    def is_left(layer) -> bool:
        reorder(layer)
        return not is_reordered(layer)

    assert all(is_left(linear(QKVParallelLinear, dtype)) for dtype in (torch.float32, torch.float16))
    quantized, convolution, view = (linear(QKVParallelLinear) for _ in range(3))
    quantized.quant_method = Quantized()
    convolution.weight.data = convolution.weight.data[:, None]
    view.weight.data = torch.cat((view.weight.data, view.weight.data))[:96]
    assert all(map(is_left, (quantized, convolution, view)))
    with monkeypatch.context() as context:
        context.setattr(reordering, "get_lora", lambda: SimpleNamespace(enable_lora=True))
        assert is_left(linear(QKVParallelLinear))
    monkeypatch.setattr(reordering, "multiplies_bfloat16", lambda: False)
    assert is_left(linear(QKVParallelLinear))


def halves(tensors):
    return {name: one.bfloat16() if one.is_floating_point() else one for name, one in tensors.items()}


@pytest.fixture
def pair():
    """A reordered target and draft in bfloat16 that take weight updates."""
    start()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        made = Pair("DFlash")
        for model in (made.target, made.draft):
            reorder(model)
        yield made
    finally:
        torch.set_default_dtype(before)


def reordered_layers(model):
    return {name: layer for name, layer in model.named_modules() if is_reordered(layer)}


def weights(model):
    return {name: plain_weight(layer).clone() for name, layer in reordered_layers(model).items()}


def same(found, expected) -> bool:
    assert found.keys() == expected.keys()
    return all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_a_tied_head_keeps_its_rows(pair):
    embedding = pair.target.model.embed_tokens
    ids = torch.tensor([3, 1, 3])
    expected = embedding.weight[ids].clone()
    hidden = torch.randn(8, expected.shape[1]).bfloat16()
    exact = hidden.double() @ embedding.weight.double().t()
    assert pair.target.lm_head.weight is embedding.weight or pair.target.lm_head is embedding
    assert is_reordered(pair.target.lm_head)
    assert torch.equal(embedding(ids), expected)
    for logits in (
        pair.target.logits_processor._compute_lm_head(hidden, pair.target.lm_head),
        pair.draft.logits(hidden),
    ):
        torch.testing.assert_close(logits.double(), exact, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("keeps_plain", [False, True])
def test_the_first_tokens_of_a_reordered_head(keeps_plain):
    """The plain values serve a short product. Where they are gone the whole head multiplies."""
    generator = torch.Generator().manual_seed(3)
    weight, hidden = (torch.randn(n, 48, generator=generator).bfloat16() for n in (128, 8))
    head = lm_head(weight)
    head.weight.data = head.weight.data.bfloat16()
    head.quant_method = ReorderedHeadMethod(keeps_plain)
    head.quant_method.process_weights_after_loading(head)
    exact = (hidden.double() @ weight.double().T)[:, :40]
    logits, ids = largest_logits(hidden, head, 3, 40)
    # Logits that round to one bfloat16 may change places.
    for found in (logits.double(), exact.gather(1, ids)):
        torch.testing.assert_close(found, exact.topk(3, dim=-1).values, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("way", ["tensors", "bucket", "distributed"])
def test_updates_reorder_again(way, pair):
    """What changes is reordered again, the head's weight too."""
    name = "model.layers.0.mlp.down_proj"
    old, tensors = weights(pair.target), halves(tensors_of(TARGET))
    names = (f"{name}.weight", "model.embed_tokens.weight")
    new = {one: tensors[one].roll(1, 0) for one in names}
    draft = weights(pair.draft)
    kv = pair.draft.layers[0].self_attn.context_kv_weight()[0].clone()
    assert pair.send(new, "target", way)[0]
    found = weights(pair.target)
    assert torch.equal(found.pop(name), new[f"{name}.weight"])
    heads = [one for one in found if "embed_tokens" in one or "lm_head" in one]
    assert heads
    assert all(torch.equal(found.pop(head), new["model.embed_tokens.weight"]) for head in heads)
    assert same(found, {one: old[one] for one in found})
    hidden = torch.randn(4, new["model.embed_tokens.weight"].shape[1]).bfloat16()
    exact = hidden.double() @ new["model.embed_tokens.weight"].double().t()
    torch.testing.assert_close(pair.draft.logits(hidden).double(), exact, rtol=2**-7, atol=1e-3)
    assert same(weights(pair.draft), draft)
    assert torch.equal(pair.draft.layers[0].self_attn.context_kv_weight()[0], kv)


def test_context_weights_follow_an_update_of_the_draft(pair):
    pair.draft.stack_kv_weights()
    assert not pair.draft.kv_weight.isnan().any()
    name = "layers.0.self_attn.k_proj.weight"
    new = {name: halves(tensors_of(DRAFT))[name].roll(1, 0)}
    assert pair.send(new, "draft")[0]
    rows = new[name].shape[0]
    assert torch.equal(pair.draft.kv_weight[:rows], new[name])


def test_the_dense_forward_wants_reordered_layers_and_follows_their_norms(pair):
    """Another update writes into the norm's weight, as the loader does."""
    model = pair.target.model
    dense_forward.install(pair.target)
    norm = model.layers[2].input_layernorm
    x = torch.randn(3, norm.weight.numel()).bfloat16()
    ours = model.forward.layers[2].input_norm
    for scale in (1.0, 1.5):
        update = {"model.layers.2.input_layernorm.weight": norm.weight.data * scale}
        assert pair.send(update, "target")[0]
        model.forward.read_norms()
        torch.testing.assert_close(ours.apply(x), norm.forward_native(x), rtol=2**-7, atol=1e-4)
    DefaultModelLoader.restore_weights_before_loading(pair.target, torch.device("cpu"))
    del model.forward
    dense_forward.install(pair.target)
    assert "forward" not in vars(model)


@pytest.mark.parametrize("option", [{"forward_hooks": [{}]}, {"debug_tensor_dump_output_folder": "x"}])
def test_hooked_layers_keep_sglangs_forward(option, pair):
    with get_observability().override(**option):
        dense_forward.install(pair.target)
        assert "forward" not in vars(pair.target.model)
    dense_forward.install(pair.target)
    assert "forward" in vars(pair.target.model)


def test_a_refused_update_leaves_the_reordered_weights(pair):
    """SGLang writes into the refused one before it compares sizes, and the answer says so."""
    name, layers = "model.layers.0.mlp.down_proj", reordered_layers(pair.target)
    before = weights(pair.target), weights(pair.draft)
    is_done, message = pair.send({f"{name}.weight": torch.zeros(3, 3).bfloat16()}, "target")
    assert not is_done and "the target's weights may be partly updated" in message
    found = weights(pair.target)
    del found[name], before[0][name]
    assert same(found, before[0]) and reordered_layers(pair.target) == layers
    assert same(weights(pair.draft), before[1])


def test_sglangs_loader_restores_and_reorders(pair):
    """Between the two, products are with the plain weights."""
    device, before = torch.device("cpu"), weights(pair.target)
    DefaultModelLoader.restore_weights_before_loading(pair.target, device)
    assert not reordered_layers(pair.target)
    assert not any(parameter.isnan().any() for parameter in pair.target.parameters())
    layer = pair.target.model.layers[0].mlp.down_proj
    x = torch.randn(2, layer.weight.shape[1]).bfloat16()
    assert torch.equal(layer(x)[0], nn.functional.linear(x, layer.weight))
    DefaultModelLoader.postprocess_weights(pair.target, device)
    assert same(weights(pair.target), before)
