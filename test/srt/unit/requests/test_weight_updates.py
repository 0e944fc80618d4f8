"""Weight updates of target and draft in every way of SGLang's.

SGLang's own updaters and its entry of requests run with the bundled models: in process, and in a server.
"""

import base64
import io
import json
import shutil
import urllib.error
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import pytest
import sglang  # noqa: F401  loads our platform plugin before any of SGLang's modules
import torch
from safetensors.torch import save_file
from serving import DRAFT, TARGET, WHOLE_BLOCKS, dflash_arguments
from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput, UpdateWeightsFromIPCReqInput
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.model_loader.loader import DefaultModelLoader
from support.draft_cases import BASE, random_weights
from support.drafts import make_draft
from support.engine import build, read_config
from support.parity import assert_same
from support.quantized_drafts import quantize, write
from support.releases import IS_0_5_22
from support.servers import FLOAT32
from support.weight_updates import DRAFTS, Pair, build_draft, build_target, serialized, state, tensors_of

from sglang_dflash.srt.configs.draft_config_parser import DraftConfigParser
from sglang_dflash.srt.configs.draft_tensors import canonical_name
from sglang_dflash.srt.models.dflash import DFlashDraftModel
from sglang_dflash.srt.models.loading import check_tensors, load_tensors

WAYS = ("tensors", "bucket", "distributed")
TENSORS = tensors_of(TARGET) | tensors_of(DRAFT)
NORM, UP = "model.norm.weight", "model.layers.0.mlp.up_proj.weight"
GATE, DOWN = "layers.0.mlp.gate_proj.weight", "layers.1.mlp.down_proj.weight"
# One of each kind of tensor: fused, sharded, plain; and what one kind of draft has alone.
PARTS = {
    "DFlash": ("fc.weight", GATE, DOWN, "layers.1.self_attn.v_proj.weight"),
    "own vocabulary": ("d2t", "lm_head.weight", NORM),
    "DFlash2": ("candidate_selector.successor_codebook", "layers.0.mlp_conv.base_kernel"),
    "P-EAGLE": ("mask_hidden", "midlayer.hidden_norm.weight", "embed_tokens.weight"),
}


@pytest.fixture(scope="module")
def pair():
    """A pair that each test leaves as it found it."""
    return Pair()


def changed(tensors, *names):
    """Return other values for some of a checkpoint's tensors."""
    found = {name: tensors.get(name, tensors.get(canonical_name(name))) for name in names}
    return {name: one.roll(1, 0) if name != "d2t" else one.clamp(max=100) for name, one in found.items()}


def same(found, expected) -> bool:
    assert found.keys() == expected.keys()
    return all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


@contextmanager
def unchanged(pair: Pair):
    """Check that neither model is changed meanwhile."""
    target, draft = state(pair.target), state(pair.draft)
    yield
    assert same(state(pair.target), target) and same(state(pair.draft), draft)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("selector", ["all", "target"])
def test_some_tensors_of_the_target(selector, way, pair):
    """RL trainers send a target's tensors in buckets, under the default selector."""
    tensors, before = tensors_of(TARGET), state(pair.draft)
    new = changed(tensors, "model.layers.3.self_attn.q_proj.weight", UP)
    assert pair.send(new, selector, way)[0]
    assert same(state(pair.target), state(build_target({**tensors, **new})))
    assert same(state(pair.draft), before)
    assert pair.send({name: tensors[name] for name in new}, selector, way)[0]


@pytest.mark.parametrize("kind, names", PARTS.items())
def test_some_tensors_of_the_draft(kind, names):
    """Each in a separate update; what is made of the weights follows, where CUDA graphs read it."""
    pair, tensors = Pair(kind), tensors_of(DRAFTS[kind][1])
    places = {name: one.data_ptr() for name, one in pair.draft.named_buffers()}
    with unchanged(SimpleNamespace(target=pair.target, draft=pair.target)):
        for name, way in zip(names, (*WAYS, "tensors"), strict=False):
            pair.draft.layers[0].self_attn.qk_weight = torch.ones(1)
            assert pair.send(changed(tensors, name), "draft", way)[0], name
            assert pair.draft.layers[0].self_attn.qk_weight is None
    new = {canonical_name(name): one for name, one in changed(tensors, *names).items()}
    assert same(state(pair.draft), state(build_draft(kind, {**tensors, **new})))
    assert places == {name: one.data_ptr() for name, one in pair.draft.named_buffers()}
    if kind != "own vocabulary":  # names that only the draft has need no selector
        other, back = changed(tensors_of(TARGET), NORM), {names[0]: tensors[names[0]]}
        assert pair.send({**other, **back})[0]
        assert same(state(pair.draft), state(build_draft(kind, {**tensors, **new, **back})))
        assert torch.equal(pair.target.model.norm.weight, other[NORM])


# Selector, a tensor that fits, the name and the value of one that does not.
REFUSED = {
    "a name of another draft": ("draft", "fc.weight", "layers.9.mlp.up_proj.weight", torch.zeros(512, 256)),
    "too many rows": ("draft", "fc.weight", GATE, torch.zeros(513, 256)),
    "integers": ("draft", "fc.weight", GATE, torch.zeros(512, 256, dtype=torch.int32)),
    "a head that the draft borrows": ("draft", "fc.weight", "lm_head.weight", torch.zeros(2048, 256)),
    "a name of both models": ("all", UP, GATE, torch.zeros(512, 256)),
    "the draft's with the target's": ("all", UP, "fc.weight", torch.zeros(3)),
}


@pytest.mark.parametrize("selector, good, name, tensor", REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_answered_and_the_old_weights_stay(selector, good, name, tensor, pair):
    """Also of the tensors before the one that does not fit, the target's included."""
    with unchanged(pair):
        for way in WAYS:
            is_done, message = pair.send({**changed(TENSORS, good), name: tensor}, selector, way)
            assert not is_done and "the old weights stay" in message, message
            assert name.removeprefix("model.") in message, message


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("selector", ["all", "target"])
def test_what_does_not_fit_the_target_is_answered(selector, way, pair):
    """SGLang's loader writes the tensors before it, as without a draft."""
    tensors, before = tensors_of(TARGET), state(pair.draft)
    is_done, message = pair.send({**changed(tensors, UP), NORM: torch.zeros(3)}, selector, way)
    assert not is_done and "the target's weights may be partly updated" in message, message
    assert same(state(pair.draft), before)
    assert pair.send(tensors, "target")[0]


def test_other_floats_are_cast(pair):
    half = {GATE: TENSORS[GATE].to(torch.float16)}
    assert pair.send(half, "draft")[0]
    fused = pair.draft.layers[0].mlp.gate_up_proj.weight
    assert fused.dtype == torch.float32 and torch.equal(fused[:512], half[GATE].float())
    assert pair.send({GATE: TENSORS[GATE]}, "draft")[0]


def test_direct_copies(pair):
    """`load_format="direct"` passes the models' loaders by, and takes the names of their parameters."""
    new, name = changed(TENSORS, "fc.weight"), "layers.0.self_attn.qkv_proj.weight"
    before = state(pair.draft)["kv_weight"]
    with unchanged(pair):
        is_done, message = pair.send(new, "all", "direct")
        assert not is_done and 'needs the selector "target" or "draft"' in message
        assert not pair.send(new, "draft", "no such format")[0]
    assert pair.send(new, "draft", "direct")[0]
    assert torch.equal(pair.draft.fc.weight, new["fc.weight"])
    assert pair.send(changed(TENSORS, NORM), "target", "direct")[0]
    assert torch.equal(pair.target.model.norm.weight, changed(TENSORS, NORM)[NORM])
    assert pair.send({name: pair.draft.get_parameter(name) * 2}, "draft", "direct")[0]
    assert not torch.equal(state(pair.draft)["kv_weight"], before)
    assert pair.send(tensors_of(DRAFT), "draft")[0] and pair.send(tensors_of(TARGET), "target")[0]


def test_the_targets_embedding_is_the_drafts(pair):
    """The draft reads the borrowed modules."""
    tensors = tensors_of(TARGET)
    new = changed(tensors, "model.embed_tokens.weight")
    assert pair.send(new)[0]
    ids = torch.arange(20)
    assert torch.equal(pair.draft.embed(ids), new["model.embed_tokens.weight"][:20])
    assert pair.send({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]})[0]


def test_plain_weights_for_a_draft_that_was_dequantized(tmp_path):
    """A trainer has no quantized ones. Half of a quantized module is named."""
    plain = tensors_of(DRAFT)
    tensors, quantization, _ = quantize(plain, "W4A16")
    folder = write(tmp_path / "draft", DRAFT, tensors, quantization)
    config = DraftConfigParser().parse(str(folder), trust_remote_code=False)
    pair = Pair(draft=build(DFlashDraftModel, config, iter(tensors.items())))
    assert pair.send({GATE: plain[GATE], "fc.weight": plain["fc.weight"]}, "draft")[0]
    assert torch.equal(pair.draft.fc.weight, plain["fc.weight"])
    module = GATE.removesuffix("weight")
    with unchanged(pair):
        half = {
            "fc.weight": plain["fc.weight"] * 2,
            f"{module}weight_scale": tensors[f"{module}weight_scale"],
        }
        is_done, message = pair.send(half, "draft")
        assert not is_done and f"{module}weight_packed: missing" in message, message
    assert pair.send({name: one for name, one in tensors.items() if name.startswith(module)}, "draft")[0]
    assert not torch.equal(pair.draft.layers[0].mlp.gate_up_proj.weight[:512], plain[GATE])


def test_a_width_that_sglang_rounds_up(tmp_path):
    """On a CPU, to a multiple of 32. A part alone does not tell the checkpoint's width."""
    weights = random_weights(BASE, 2)
    width = {"intermediate_size": 96, "original_intermediate_size": BASE["intermediate_size"]}
    draft = build(DFlashDraftModel, read_config(BASE | width, tmp_path), iter(weights.items()))
    load_tensors(draft, check_tensors(draft, [(DOWN, weights[DOWN] + 1)], is_update=True))
    weight = draft.layers[1].mlp.down_proj.weight
    assert torch.equal(weight[:, :80], weights[DOWN] + 1) and not weight[:, 80:].any()


def test_payloads_that_cannot_be_read_are_answered(pair):
    """They would end the scheduler."""
    with unchanged(pair):
        assert pair.begin().success
        payload = serialized(changed(TENSORS, "fc.weight"))
        for payloads, selector in (([b"no pickle"], "all"), ([], "all"), ([payload], "nobody")):
            is_done, message = pair.send_payloads(payloads, selector)
            assert not is_done and "the old weights stay" in message
        assert pair.end().success
        assert not pair.end().success
        assert not pair.begin("nobody").success


def folder(path, checkpoint, tensors, has_config=True):
    path.mkdir()
    save_file({name: one.contiguous() for name, one in tensors.items()}, path / "model.safetensors")
    if has_config:
        shutil.copy(checkpoint / "config.json", path)
    return path


def test_checkpoints_on_disk(pair, tmp_path):
    """Each for its model. The names of a bare folder, as trainers write it, say whose it is."""
    targets, drafts = tensors_of(TARGET), tensors_of(DRAFT)
    before = state(pair.draft)
    new = targets | changed(targets, NORM)
    assert pair.load(folder(tmp_path / "target", TARGET, new, has_config=False))[0]
    assert same(state(pair.target), state(build_target(new))) and same(state(pair.draft), before)
    new = drafts | changed(drafts, "fc.weight", "layers.1.self_attn.v_proj.weight")
    assert pair.load(folder(tmp_path / "draft", DRAFT, new))[0]
    assert same(state(pair.draft), state(build_draft("DFlash", new)))
    assert pair.load(TARGET)[0] and pair.load(DRAFT)[0]
    assert same(state(pair.target), state(build_target(targets))) and same(state(pair.draft), before)
    assert pair.load(folder(tmp_path / "bare", DRAFT, new, has_config=False))[0]
    assert same(state(pair.draft), state(build_draft("DFlash", new)))
    half = folder(tmp_path / "half", DRAFT, dict(list(drafts.items())[::2]), has_config=False)
    is_done, message = pair.load(half)
    assert not is_done and "old weights stay" in message
    assert pair.load(DRAFT)[0] and same(state(pair.target), state(build_target(targets)))


def test_another_drafts_config_on_disk(pair, tmp_path):
    """Its weights may fit, and would accept little. A flag may have set the served draft's block size."""
    before = state(pair.draft)
    other = make_draft(tmp_path / "other", dflash_config={"target_layer_ids": [1, 4, 7, 9]})
    is_done, message = pair.load(other)
    assert not is_done and "old weights stay" in message and "differ in target_layer_ids (" in message
    assert same(state(pair.draft), before)
    assert pair.load(make_draft(tmp_path / "longer", block_size=16))[0]
    (other / "config.json").write_text((other / "config.json").read_text()[:-9])  # cut short
    is_done, message = pair.load(other)
    assert not is_done and "config.json is not JSON" in message and same(state(pair.draft), before)
    masked = make_draft(tmp_path / "masked")
    torch.save({"embedding": torch.zeros(256), "mask_token_id": 3}, masked / "mask_embedding.pt")
    is_done, message = pair.load(masked)
    assert not is_done and "mask_embedding.pt is another draft's" in message
    assert pair.load(DRAFT)[0]


def test_graphs_are_not_captured_again(pair):
    """SGLang would capture them with other rows, or for another of two pairs of graphs."""
    asked = UpdateWeightFromDiskReqInput(model_path=str(DRAFT), recapture_cuda_graph=True)
    answer = pair.requests.update_weights_from_disk(asked)
    assert not answer.success and "recapture_cuda_graph is not supported with DFLASH" in answer.message


def test_overrides_are_read_into_a_new_drafts_config(pair, tmp_path, monkeypatch):
    """The served one has them."""
    of_draft = pair.runners[1].model_config
    short = make_draft(tmp_path / "short", max_position_embeddings=99)
    assert "differ in max_position_embeddings 4096 and 99" in pair.load(short)[1]
    monkeypatch.setattr(of_draft, "model_override_args", {"max_position_embeddings": 4096})
    assert pair.load(short)[0] and pair.load(DRAFT)[0]


# Checkpoint, what becomes of its tensors, what the answer says.
BROKEN = {
    "half of a draft": (DRAFT, lambda tensors: dict(list(tensors.items())[::2]), "old weights stay"),
    "a short matrix": (DRAFT, lambda tensors: tensors | {GATE: tensors[GATE][:-8]}, "old weights stay"),
    "the target's": (TARGET, lambda tensors: tensors | {NORM: torch.zeros(3)}, "may be partly updated"),
}


@pytest.mark.parametrize("checkpoint, change, words", BROKEN.values(), ids=BROKEN)
def test_a_broken_checkpoint_on_disk(checkpoint, change, words, pair, tmp_path, monkeypatch):
    """The draft's weights stay, also those of earlier updates. Quantized ones are processed again."""
    assert pair.send(changed(TENSORS, NORM, "fc.weight"))[0]
    broken, steps = folder(tmp_path / "broken", checkpoint, change(tensors_of(checkpoint))), []
    for name in ("restore_weights_before_loading", "postprocess_weights"):
        monkeypatch.setattr(DefaultModelLoader, name, lambda *_, name=name: steps.append(name.split("_")[0]))
    before = state(pair.draft)
    assert not pair.load(tmp_path / "nothing")[0] and steps == []
    is_done, message = pair.load(broken)
    assert not is_done and words in message
    assert same(state(pair.draft), before)
    assert (IS_0_5_22 or steps[0] == "restore") and steps[-1] == "postprocess"
    assert pair.load(TARGET)[0] and pair.load(DRAFT)[0]


def test_the_checkpoint_engine_updates_the_target(pair, monkeypatch):
    """It sends its stream once: a second reader would wait for ever."""
    log = []

    def update(self, recv_req):
        log.append(self.get_model())
        self.get_model().load_weights(iter(recv_req.zmq_handles.items()))
        return True, "done"

    monkeypatch.setattr(WeightUpdater, "update_weights_from_ipc", update)
    request = UpdateWeightsFromIPCReqInput(zmq_handles={})
    for new, is_done in (({NORM: torch.zeros(3)}, False), (tensors_of(TARGET), True)):
        request.zmq_handles = new
        assert pair.requests.update_weights_from_ipc(request).success == is_done
    assert log == [pair.target] * 2


@pytest.fixture
def server(servers):
    return servers.get(*FLOAT32, WHOLE_BLOCKS, *dflash_arguments())


def post(server, path: str, **body) -> bool:
    try:
        return server.post(path, body)["success"]
    except urllib.error.HTTPError as error:
        return json.loads(error.read())["success"]


def update(server, tensors, selector: str = "all") -> bool:
    """Send tensors as a trainer does, by handles of shared memory."""
    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")  # the other needs a common parent
    try:
        file = io.BytesIO()
        ForkingPickler(file).dump(list(tensors.items()))
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)
    payload = base64.b64encode(file.getvalue()).decode()
    assert post(server, "/begin_weight_update", selector=selector)
    options = {"selector": selector, "flush_cache": True}
    is_done = post(server, "/update_weights_from_tensor", serialized_named_tensors=[payload], **options)
    assert post(server, "/end_weight_update")
    return is_done


def test_a_server_serves_on(server, reference):
    """With the target's text after each update, and another draft's acceptance after the draft's."""
    targets, drafts = tensors_of(TARGET), tensors_of(DRAFT)
    options = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    requests = [
        {"input_ids": list(range(first, first + 40)), "sampling_params": options} for first in (300, 900)
    ]
    expected = reference.answers(requests)

    def accept_length() -> float:
        answers = server.generate_many(requests, 2)
        assert_same(requests, answers, expected)
        cycles = sum(sum(one["meta_info"]["spec_correct_drafts_histogram"]) for one in answers)
        return 46 / cycles

    before = accept_length()
    some = {name: targets[name] for name in list(targets)[:3]}
    assert update(server, some) and accept_length() == before
    assert not update(server, {**changed(targets, "model.norm.weight"), "fc.weight": torch.zeros(3)})
    assert not update(server, {"fc.weight": torch.zeros(3)}, "draft")
    assert post(server, "/begin_weight_update")
    assert not post(server, "/update_weights_from_tensor", serialized_named_tensors=["bm8gcGlja2xl"])
    assert post(server, "/end_weight_update")
    assert accept_length() == before
    assert update(server, {"norm.weight": -drafts["norm.weight"]}, "draft")
    assert accept_length() < min(before, 1.1)
    assert update(server, drafts, "draft") and accept_length() == before
