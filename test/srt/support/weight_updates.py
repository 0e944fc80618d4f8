"""A target and a draft under SGLang's weight updaters and its entry of update requests, without a server."""

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from safetensors.torch import load_file
from serving import DFLASH2_DRAFT, DRAFT, PEAGLE_DRAFT, SPECULATORS_DRAFT, TARGET
from sglang.srt.managers import io_struct
from sglang.srt.model_executor.model_runner_components import weight_updater
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.models.qwen3 import Qwen3ForCausalLM
from sglang.srt.runtime_context import get_parallel
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket
from support.engine import build, start

from sglang_dflash.srt.configs.draft_config_parser import DraftConfigParser
from sglang_dflash.srt.models.dflash import DFlashDraftModel
from sglang_dflash.srt.models.dflash2 import DFlash2DraftModel
from sglang_dflash.srt.models.peagle import PEagleDraftModel
from sglang_dflash.srt.speculative.weight_updates import WeightUpdateRequests

DRAFTS = {
    "DFlash": (DFlashDraftModel, DRAFT),
    "own vocabulary": (DFlashDraftModel, SPECULATORS_DRAFT),
    "DFlash2": (DFlash2DraftModel, DFLASH2_DRAFT),
    "P-EAGLE": (PEagleDraftModel, PEAGLE_DRAFT),
}
Tensors = dict[str, torch.Tensor]

# SGLang patches PyTorch's pickling of tensors for a scheduler, which does not pickle any that are on a CPU.
weight_updater.monkey_patch_torch_reductions = lambda: None


def tensors_of(checkpoint: Path) -> Tensors:
    weights = load_file(checkpoint / "model.safetensors")
    return {name: one.float() if one.is_floating_point() else one for name, one in weights.items()}


def build_draft(kind: str, tensors: Tensors):
    model_class, checkpoint = DRAFTS[kind]
    config = DraftConfigParser().parse(str(checkpoint), trust_remote_code=False)
    draft = build(model_class, config, iter(tensors.items()))
    if isinstance(draft, DFlashDraftModel):
        draft.stack_kv_weights()  # as the drafter does at start-up
    return draft


def build_target(tensors: Tensors):
    config = DraftConfigParser().parse(str(TARGET), trust_remote_code=False)
    return build(Qwen3ForCausalLM, config, iter(tensors.items()))


def state(model) -> Tensors:
    """Return copies of all that a model computes with, what is made of its weights included."""
    if isinstance(model, PEagleDraftModel):
        assert model.fused_mask is not None
    named = [*model.named_parameters(), *model.named_buffers(), *vars(model).items()]
    return {name: tensor.clone() for name, tensor in named if isinstance(tensor, torch.Tensor)}


class Pair:
    """A target and a draft that serve, and the entry of requests that change their weights.

    rank: of the tensor-parallel ranks, all of which send the same requests.
    """

    def __init__(self, kind: str = "DFlash", rank: int = 0, draft=None):
        start()
        self.target = build_target(tensors_of(TARGET))
        self.draft = draft or build_draft(kind, tensors_of(DRAFTS[kind][1]))
        self.draft.borrow_from_target(self.target.model.embed_tokens, self.target.lm_head)
        self.runners = [self._runner(self.target, rank), self._runner(self.draft, rank)]
        workers = [
            SimpleNamespace(weight_update_runners=lambda pair=pair: [pair], model_runner=pair[1])
            for pair in zip(("target", "draft"), self.runners, strict=True)
        ]
        workers[0].deserialize_own_rank = lambda payloads: torch.load(
            io.BytesIO(payloads[get_parallel().tp_rank]), weights_only=False
        )
        self.requests = WeightUpdateRequests(
            tp_worker=workers[0],
            draft_worker=workers[1],
            memory_saver_adapter=None,
            flush_cache=lambda **_: True,
            is_fully_idle=lambda **_: True,
            scheduler=MagicMock(),
        )

    def _runner(self, model, rank: int):
        runner = SimpleNamespace(model=model)
        runner.model_config = SimpleNamespace(
            model_path=str(TARGET),
            revision=None,
            dtype=torch.float32,
            quantization=None,
            hf_config=model.config,
            model_override_args={},
        )
        runner.weight_updater = WeightUpdater(
            tp_rank=rank,
            device="cpu",
            gpu_id=0,
            model_config=runner.model_config,
            custom_weight_loaders={},
            get_model=lambda: model,
            update_model_fields=lambda *_, **__: None,
            recapture_cuda_graph=lambda: None,
            get_model_runner=lambda: runner,
        )
        return runner

    def begin(self, selector: str = "all"):
        return self.requests.begin_weight_update(io_struct.BeginWeightUpdateReqInput(selector=selector))

    def end(self):
        return self.requests.end_weight_update(io_struct.EndWeightUpdateReqInput())

    def send(self, tensors: Tensors, selector: str = "all", way: str = "tensors") -> tuple[bool, str]:
        """Send tensors in one of SGLang's ways, in a separate session."""
        assert self.begin(selector).success
        if way == "distributed":
            answer = self.send_received(tensors, selector)
        else:
            answer = self.send_payloads([serialized(tensors, way)], selector, way)
        assert self.end().success
        return answer

    def send_payloads(
        self, payloads: list[bytes], selector: str = "all", way: str = "tensors"
    ) -> tuple[bool, str]:
        """Send serialized tensors, one payload for each rank, in an open session."""
        load_format = {"tensors": None, "bucket": "flattened_bucket"}.get(way, way)
        request = io_struct.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=payloads, load_format=load_format, selector=selector
        )
        answer = self.requests.update_weights_from_tensor(request)
        return answer.success, answer.message

    def send_received(self, tensors: Tensors, selector: str = "all") -> tuple[bool, str]:
        """Send tensors through a process group, in an open session."""
        self.runners[0].weight_updater._model_update_group["group"] = None
        waiting = iter(tensors.values())
        request = io_struct.UpdateWeightsFromDistributedReqInput(
            names=list(tensors),
            dtypes=[str(one.dtype).removeprefix("torch.") for one in tensors.values()],
            shapes=[list(one.shape) for one in tensors.values()],
            group_name="group",
            selector=selector,
        )
        broadcast = MagicMock(side_effect=lambda tensor, **_: [tensor.copy_(next(waiting)), MagicMock()][1])
        with patch.object(torch.distributed, "broadcast", broadcast):
            answer = self.requests.update_weights_from_distributed(request)
        return answer.success, answer.message

    def load(self, checkpoint: Path) -> tuple[bool, str]:
        """Update from disk."""
        answer = self.requests.update_weights_from_disk(
            io_struct.UpdateWeightFromDiskReqInput(model_path=str(checkpoint), load_format="auto")
        )
        return answer.success, answer.message


def serialized(tensors: Tensors, way: str = "tensors") -> bytes:
    """Return a rank's payload. SGLang's own serializer shares memory between processes."""
    sent: Any = list(tensors.items())
    if way == "bucket":
        bucket = FlattenedTensorBucket(named_tensors=sent)
        sent = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
    file = io.BytesIO()
    torch.save(sent, file)
    return file.getvalue()


def run_rank(rank: int, folder: Path) -> None:
    """Send updates to one of two ranks that only rank 1 cannot take, and save the answers."""
    pair, answers = Pair(rank=rank), {}
    good = {"model.norm.weight": torch.full((256,), 2.0)}
    payload = serialized(good)
    fits, short = (serialized({"norm.weight": torch.ones(size)}) for size in (256, 3))
    load, receive = Qwen3ForCausalLM.load_weights, WeightUpdater.receive_weights_from_distributed

    def fail(*_, **__):
        raise OSError("lost")

    def fail_late(model, weights):
        load(model, weights)
        return fail() if rank == 1 else None

    def note(case: str, update, *arguments) -> None:
        before = [*state(pair.target).values(), *state(pair.draft).values()]
        done, message = update(*arguments)
        after = [*state(pair.target).values(), *state(pair.draft).values()]
        answers[case] = done, message, not all(map(torch.equal, before, after))

    assert pair.begin().success
    note("an unreadable payload", pair.send_payloads, [payload, b"no pickle"])
    note("no payload", pair.send_payloads, [payload])
    note("another shape", pair.send_payloads, [fits, short], "draft")
    with patch.object(WeightUpdater, "receive_weights_from_distributed", fail if rank == 1 else receive):
        note("no tensors of the group", pair.send_received, good)
    with patch.object(Qwen3ForCausalLM, "load_weights", fail_late):
        note("in the copies", pair.send_payloads, [payload, payload])
        note("in the copies of a file", pair.load, TARGET)
    note("none", pair.send_payloads, [serialized({"model.norm.weight": torch.full((256,), 3.0)})] * 2)
    assert pair.end().success
    (folder / f"updates-{rank}.json").write_text(json.dumps(answers))
