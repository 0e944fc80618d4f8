"""Weight updates of target and draft in every way of SGLang's, in process.

SGLang's own updaters and its entry of requests run, with the bundled models.
"""

import base64
import io
import json
import shutil
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import pytest
import sglang  # noqa: F401  loads our platform plugin before any of SGLang's modules
import torch
from safetensors.torch import save_file
from serving import DRAFT, TARGET, WHOLE_BLOCKS, dflash_arguments
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.model_loader.loader import DefaultModelLoader
from support.draft_cases import BASE, random_weights
from support.engine import build, read_config
from support.packed_drafts import pack, write
from support.parity import assert_same
from support.servers import FLOAT32
from support.weight_updates import (
    DRAFTS,
    Pair,
    build_draft,
    build_target,
    serialized,
    state,
    tensors_of,
)

from sglang_dflash.srt.configs.draft_config_parser import DraftConfigParser
from sglang_dflash.srt.configs.draft_tensors import canonical_name
from sglang_dflash.srt.models.dflash import DFlashDraftModel
from sglang_dflash.srt.speculative import weight_updates
from sglang_dflash.srt.speculative.weight_updates import without_writes

WAYS = ("tensors", "bucket", "distributed")
GATE, DOWN = "layers.0.mlp.gate_proj.weight", "layers.1.mlp.down_proj.weight"
# One of each kind of tensor: fused, sharded, plain; and what one kind of draft has alone.
PARTS = {
    "DFlash": (
        "fc.weight",
        GATE,
        DOWN,
        "layers.1.self_attn.v_proj.weight",
        "layers.0.self_attn.k_norm.weight",
    ),
    "own vocabulary": ("d2t", "lm_head.weight", "model.norm.weight"),
    "DFlash2": ("candidate_selector.successor_codebook", "layers.0.mlp_conv.base_kernel", "fc.weight"),
    "P-EAGLE": ("mask_hidden", "midlayer.hidden_norm.weight", "embed_tokens.weight", "d2t"),
}
ALONE = {
    "DFlash": ("fc.weight", "hidden_norm.weight"),
    "DFlash2": ("candidate_selector.successor_codebook", "layers.0.mlp_conv.base_kernel"),
    "P-EAGLE": ("mask_hidden", "fc.weight"),
    "own vocabulary": ("d2t", "hidden_norm.weight"),
}


@pytest.fixture(scope="module")
def pairs():
    """Pairs of target and draft by the draft's kind. Each test leaves them as it found them."""
    made: dict[str, Pair] = {}

    def get(kind: str = "DFlash") -> Pair:
        return made.setdefault(kind, Pair(kind))

    return get


@pytest.fixture
def pair(pairs):
    return pairs()


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
    new = changed(tensors, "model.layers.3.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight")
    assert pair.send(new, selector, way)[0]
    assert same(state(pair.target), state(build_target({**tensors, **new})))
    assert same(state(pair.draft), before)
    assert pair.send({name: tensors[name] for name in new}, selector, way)[0]
    assert same(state(pair.target), state(build_target(tensors)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind, names", [(kind, PARTS[kind]) for kind in DRAFTS])
def test_some_tensors_of_the_draft(kind, names, way, pairs):
    """Each in a separate update; what is made of the weights follows, where CUDA graphs read it."""
    pair, tensors = pairs(kind), tensors_of(DRAFTS[kind][1])
    target, before = state(pair.target), state(pair.draft)
    places = {name: one.data_ptr() for name, one in pair.draft.named_buffers()}
    kv = getattr(pair.draft, "kv_weight", None)
    for name in names:
        pair.draft.layers[0].self_attn.qk_weight = torch.ones(1)
        assert pair.send(changed(tensors, name), "draft", way)[0], name
        assert pair.draft.layers[0].self_attn.qk_weight is None
    new = {canonical_name(name): one for name, one in changed(tensors, *names).items()}
    assert same(state(pair.draft), state(build_draft(kind, {**tensors, **new})))
    assert same(state(pair.target), target)
    assert places == {name: one.data_ptr() for name, one in pair.draft.named_buffers()}
    assert getattr(pair.draft, "kv_weight", None) is kv
    assert pair.send(tensors, "draft", way)[0]
    assert same(state(pair.draft), before)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind, names", ALONE.items())
def test_names_that_only_the_draft_has_are_told_apart(kind, names, way, pairs):
    """Under "all" with tensors of the target."""
    pair, tensors, targets = pairs(kind), tensors_of(DRAFTS[kind][1]), tensors_of(TARGET)
    before = state(pair.draft)
    new, other = changed(tensors, *names), changed(targets, "model.norm.weight")
    assert pair.send({**other, **new}, "all", way)[0]
    assert same(state(pair.draft), state(build_draft(kind, {**tensors, **new})))
    assert same(state(pair.target), state(build_target({**targets, **other})))
    back = {name: (tensors | targets)[name] for name in (*new, *other)}
    assert pair.send(back, "all", way)[0]
    assert same(state(pair.draft), before)


GOOD_DRAFT, GOOD_TARGET = "fc.weight", "model.layers.0.mlp.up_proj.weight"
REFUSED = {
    "a name of another draft": ("draft", GOOD_DRAFT, "layers.9.mlp.up_proj.weight", torch.zeros(512, 256)),
    "a part of no layer": ("draft", GOOD_DRAFT, "layers.0.self_attn.qkv_proj.weight", torch.zeros(512, 256)),
    "too few rows": ("draft", GOOD_DRAFT, GATE, torch.zeros(511, 256)),
    "too many rows": ("draft", GOOD_DRAFT, GATE, torch.zeros(513, 256)),
    "integers": ("draft", GOOD_DRAFT, GATE, torch.zeros(512, 256, dtype=torch.int32)),
    "FP8 for a dense layer": ("draft", GOOD_DRAFT, GATE, torch.zeros(512, 256).to(torch.float8_e4m3fn)),
    "an embedding that the draft borrows": (
        "draft",
        GOOD_DRAFT,
        "embed_tokens.weight",
        torch.zeros(2048, 256),
    ),
    "a head that the draft borrows": ("draft", GOOD_DRAFT, "lm_head.weight", torch.zeros(2048, 256)),
    "a name of both models": ("all", GOOD_TARGET, GATE, torch.zeros(512, 256)),
    "the norm of both models": ("all", GOOD_DRAFT, "norm.weight", torch.zeros(256)),
    "the draft's with the target's": ("all", GOOD_TARGET, "fc.weight", torch.zeros(3)),
    "the target's, too few rows": ("all", GOOD_TARGET, f"model.{DOWN}", torch.zeros(255, 512)),
    "the target's, another norm": ("target", GOOD_TARGET, "model.norm.weight", torch.zeros(255)),
    "the target's, of no layer": ("target", GOOD_TARGET, "model.layers.0.x.q_proj.weight", torch.zeros(2)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("selector, good, name, tensor", REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_answered_and_the_old_weights_stay(selector, good, name, tensor, way, pair):
    """Also of the tensors before the one that does not fit."""
    new = changed(tensors_of(TARGET if good.startswith("model.") else DRAFT), good)
    with unchanged(pair):
        is_done, message = pair.send({**new, name: tensor}, selector, way)
        assert not is_done and "the old weights stay" in message, message
        assert name.startswith("model.") or name in message, message
    back = {good: (tensors_of(TARGET) | tensors_of(DRAFT))[good]}
    assert pair.send(new, selector, way)[0] and pair.send(back, selector, way)[0]


def test_another_dtype_is_cast(pair):
    """As SGLang does."""
    half = {GATE: tensors_of(DRAFT)[GATE].to(torch.float16)}
    assert pair.send(half, "draft")[0]
    fused = pair.draft.layers[0].mlp.gate_up_proj.weight
    assert fused.dtype == torch.float32 and torch.equal(fused[:512], half[GATE].float())
    assert pair.send({GATE: tensors_of(DRAFT)[GATE]}, "draft")[0]


@pytest.mark.parametrize("name, selector", [("fc.weight", "all"), ("model.norm.weight", "target")])
def test_direct_copies(name, selector, pair):
    """`load_format="direct"` passes the models' loaders by, and takes the names of their parameters."""
    tensors = tensors_of(TARGET if selector == "target" else DRAFT)
    model = pair.target if selector == "target" else pair.draft
    new = changed(tensors, name)
    with unchanged(pair):
        answer = pair.send({**new, "model.x.weight": new[name]}, selector, "direct")
        assert not answer[0] and "the old weights stay" in answer[1] and "model.x.weight" in answer[1]
        assert not pair.send(new, selector, "no such format")[0]
    assert pair.send(new, selector, "direct")[0]
    assert torch.equal(model.get_parameter(name), new[name])
    assert pair.send({name: tensors[name]}, selector, "direct")[0]
    fused = {"layers.0.self_attn.qkv_proj.weight": pair.draft.layers[0].self_attn.qkv_proj.weight * 2}
    before = state(pair.draft)["kv_weight"]
    assert pair.send(fused, "draft", "direct")[0]
    assert not torch.equal(state(pair.draft)["kv_weight"], before)
    assert pair.send(tensors_of(DRAFT), "draft")[0]


def test_the_targets_embedding_is_the_drafts(pair):
    """The draft reads the borrowed modules, and its FP8 head follows them."""
    tensors = tensors_of(TARGET)
    assert pair.draft.use_fp8_head() is None
    before = pair.draft.head.weight.clone()
    new = changed(tensors, "model.embed_tokens.weight")
    assert pair.send(new)[0]
    ids = torch.arange(20)
    assert torch.equal(pair.draft.embed(ids), new["model.embed_tokens.weight"][:20])
    assert torch.equal(pair.draft.head.weight, before.roll(1, 0))
    assert pair.send(tensors)[0]
    pair.draft._fp8_head = None


def test_plain_weights_for_a_draft_that_was_dequantized(tmp_path):
    """A trainer has no packed ones. Half of a packed module is named."""
    plain = tensors_of(DRAFT)
    packed, quantization, _ = pack(plain, "W4A16")
    folder = write(tmp_path / "draft", DRAFT, packed, quantization)
    config = DraftConfigParser().parse(str(folder), trust_remote_code=False)
    pair = Pair(draft=build(DFlashDraftModel, config, iter(packed.items())))
    names = ("layers.0.mlp.gate_proj", "fc")
    for name in names:
        assert pair.send({f"{name}.weight": plain[f"{name}.weight"]}, "draft")[0]
    assert torch.equal(pair.draft.fc.weight, plain["fc.weight"])
    with unchanged(pair):
        half = {
            "fc.weight": plain["fc.weight"] * 2,
            f"{names[0]}.weight_scale": packed[f"{names[0]}.weight_scale"],
        }
        is_done, message = pair.send(half, "draft")
        assert not is_done and f"{names[0]}.weight_packed: missing" in message, message
    whole = {name: one for name, one in packed.items() if name.startswith(f"{names[0]}.")}
    assert pair.send(whole, "draft")[0]
    assert not torch.equal(pair.draft.layers[0].mlp.gate_up_proj.weight[:512], plain[f"{names[0]}.weight"])


def test_a_width_that_sglang_rounds_up(tmp_path):
    """On a CPU, to a multiple of 32. A part alone does not tell the checkpoint's width."""
    weights = random_weights(BASE, 2)
    width = {"intermediate_size": 96, "original_intermediate_size": BASE["intermediate_size"]}
    draft = build(DFlashDraftModel, read_config(BASE | width, tmp_path), iter(weights.items()))
    draft.takes_parts = True
    new = weights[DOWN] + 1
    draft.load_weights([(DOWN, new)])
    weight = draft.layers[1].mlp.down_proj.weight
    assert torch.equal(weight[:, :80], new) and not weight[:, 80:].any()


def test_payloads_that_cannot_be_read_are_answered(pair):
    """They would end the scheduler."""
    with unchanged(pair):
        assert pair.begin().success
        for payloads in ([b"no pickle"], []):
            answer = pair.send_payloads(payloads)
            assert not answer.success and "the old weights stay" in answer.message
        answer = pair.send_payloads([serialized(changed(tensors_of(DRAFT), "fc.weight"))], "nobody")
        assert not answer.success and "nobody" in answer.message
        assert pair.end().success
        assert not pair.end().success
        assert not pair.begin("nobody").success


@pytest.mark.parametrize(
    "config, of_draft",
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, False),
        ({}, False),
        ({"architectures": ["DFlashDraftModel"]}, True),
        ({"architectures": ["PEagleSpeculator"], "speculators_model_type": "peagle"}, True),
    ],
)
def test_whose_checkpoint_a_folder_holds(config, of_draft):
    assert weight_updates.is_draft(config) == of_draft


def folder(path, checkpoint, tensors, has_config=True):
    path.mkdir()
    save_file({name: one.contiguous() for name, one in tensors.items()}, path / "model.safetensors")
    if has_config:
        shutil.copy(checkpoint / "config.json", path)
    return path


def test_checkpoints_on_disk(pair, tmp_path):
    """Each for its model; a bare folder is the target's, as trainers write it."""
    targets, drafts = tensors_of(TARGET), tensors_of(DRAFT)
    before = state(pair.draft)
    new = targets | changed(targets, "model.norm.weight")
    assert pair.load(folder(tmp_path / "target", TARGET, new, has_config=False))[0]
    assert same(state(pair.target), state(build_target(new))) and same(state(pair.draft), before)
    new = drafts | changed(drafts, "fc.weight", "layers.1.self_attn.v_proj.weight")
    assert pair.load(folder(tmp_path / "draft", DRAFT, new))[0]
    assert same(state(pair.draft), state(build_draft("DFlash", new)))
    assert pair.load(TARGET)[0] and pair.load(DRAFT)[0]
    assert same(state(pair.target), state(build_target(targets))) and same(state(pair.draft), before)


BROKEN = {
    "half of a draft": (DRAFT, lambda tensors: dict(list(tensors.items())[::2])),
    "a draft with a short matrix": (DRAFT, lambda tensors: tensors | {GATE: tensors[GATE][:-8]}),
    "a draft with one tensor more": (DRAFT, lambda tensors: tensors | {"x.weight": torch.zeros(3)}),
    "a target with a short matrix": (
        TARGET,
        lambda tensors: tensors | {f"model.{DOWN}": tensors[f"model.{DOWN}"][:-8]},
    ),
}


@pytest.mark.parametrize("checkpoint, change", BROKEN.values(), ids=BROKEN)
def test_a_broken_checkpoint_on_disk(checkpoint, change, pair, tmp_path):
    """The weights that serve stay, also those of updates that are in no checkpoint."""
    new = changed(tensors_of(TARGET), "model.norm.weight") | changed(tensors_of(DRAFT), "fc.weight")
    assert pair.send(new)[0]
    broken = folder(tmp_path / "broken", checkpoint, change(tensors_of(checkpoint)))
    with unchanged(pair):
        is_done, message = pair.load(broken)
        assert not is_done and "the old weights stay" in message and str(broken) in message
        assert not pair.load(tmp_path / "nothing")[0]
    assert all(str(broken) != runner.model_config.model_path for runner in pair.runners)
    assert pair.load(TARGET)[0] and pair.load(DRAFT)[0]


def test_quantized_weights_are_packed_again_after_a_failure(pair, tmp_path, monkeypatch):
    """SGLang unpacks them for a checkpoint."""
    steps = []
    for name in ("restore_weights_before_loading", "postprocess_weights"):
        monkeypatch.setattr(DefaultModelLoader, name, lambda *_, name=name: steps.append(name.split("_")[0]))
    assert not pair.load(tmp_path)[0] and steps == []
    assert not pair.load(folder(tmp_path / "a", TARGET, {"model.norm.weight": torch.zeros(3)}))[0]
    assert steps[0] == "restore" and steps[-1] == "postprocess"


def test_the_checkpoint_engine_updates_the_target(pair, monkeypatch):
    """It sends its stream once: a second reader would wait for ever."""
    tensors, log = tensors_of(TARGET), []

    def update(self, recv_req):
        log.append(self.get_model())
        self.get_model().load_weights(iter(recv_req.items()))
        return True, "done"

    monkeypatch.setattr(WeightUpdater, "update_weights_from_ipc", update)
    requests = SimpleNamespace(weight_version=None, flush_cache=True, torch_empty_cache=False)
    for new, is_done in (({"model.norm.weight": torch.zeros(3)}, False), (tensors, True)):
        requests.items = new.items
        answer = pair.requests.update_weights_from_ipc(requests)
        assert answer.success == is_done, answer
    assert log == [pair.target] * 2


def test_a_trial_writes_nothing_in_threads_either():
    """DeepSeek's loader copies in a pool of threads."""
    model = torch.nn.Linear(3, 2)
    before = state(model)
    with without_writes(model), ThreadPoolExecutor(2) as pool:
        done = [pool.submit(parameter.data.fill_, 7.0) for parameter in model.parameters()]
        done.append(pool.submit(model.weight.data[0].copy_, torch.ones(4)))
        model.weight.data[:, 1] = torch.ones(2)
        torch._foreach_copy_([model.bias.data], [torch.ones(2)])
        other = torch.zeros(2)
        other.copy_(model.bias.data)
    assert same(state(model), before) and torch.equal(other, before["bias"])
    with pytest.raises(RuntimeError, match="size"):
        done.pop().result()
    assert all(future.result() is not None for future in done)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(model.bias.data.fill_, 7.0).result()
    assert (model.bias == 7).all()


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
