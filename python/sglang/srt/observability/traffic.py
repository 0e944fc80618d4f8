"""Requests of a server that are recorded (`record.py`), and the columns of their lines."""

import random
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.runtime_context import get_parallel

from sglang_dflash.srt.environ import DFlashOptions
from sglang_dflash.srt.observability.record import FILE_BYTES, RecordWriter, describe_target
from sglang_dflash.srt.patching import WORKER, patches

FIELD = "speculative_record"  # in a request's `custom_params`


def check_record_choice(custom_params: Any) -> None:
    """Raise ValueError unless a request's choice, if it has one, is true or false."""
    choice = custom_params.get(FIELD, False) if isinstance(custom_params, dict) else False
    if not isinstance(choice, bool):
        raise ValueError(f"custom_params: {FIELD} is true or false, not {choice!r:.60}.")


class TrafficRecorder:
    """Collects the cycles of running requests, and hands ended requests to the writer.

    Args:
        writer: of the record.
        share: of the requests to record, 0 to 1.
        is_opt_in: whether only requests that ask for it are recorded.
        lora_manager: SGLang's, which knows the names of adapters. None without LoRA.
    """

    def __init__(self, writer: RecordWriter, share: float, is_opt_in: bool, lora_manager: Any = None):
        self.writer, self._share, self._is_opt_in = writer, share, is_opt_in
        self._lora_manager, self._dice = lora_manager, random.Random()  # the scheduler seeds the shared one
        # Of each running request, per cycle: committed tokens, and drafted tokens that were verified.
        self._cycles: WeakKeyDictionary[Any, tuple[list[int], list[int]]] = WeakKeyDictionary()

    def on_cycle(self, reqs: Sequence[Any], accepted: Sequence[int], drafted: Sequence[int]) -> None:
        """Note a complete cycle, before SGLang takes its tokens.

        Args:
            reqs: SGLang's, one a block.
            accepted: accepted drafted tokens of each.
            drafted: drafted tokens of each that could be accepted.
        """
        for req, kept, offered in zip(reqs, accepted, drafted, strict=True):
            if not (req.is_retracted or req.finished()):
                lengths, offers = self._cycles.setdefault(req, ([], []))
                lengths.append(kept + 1)
                offers.append(offered)

    def on_output(self, reqs: Sequence[Any]) -> None:
        """Record those of a step's requests that have ended, after one cycle or more."""
        for req in reqs:
            if req.finished() and (cycles := self._cycles.pop(req, None)) and self._is_wanted(req):
                self.writer.add(self._row(req, cycles))

    def _is_wanted(self, req: Any) -> bool:
        choice = (req.sampling_params.custom_params or {}).get(FIELD, not self._is_opt_in)
        others = req.multimodal_inputs, req.input_embeds, req.positional_embed_overrides
        reason = req.finished_reason
        is_broken = getattr(reason, "matched", None) == "NaN happened"  # of logits, in SGLang's words
        is_whole = not (isinstance(reason, FINISH_ABORT) or is_broken)
        return choice and others == (None,) * 3 and is_whole and self._dice.random() < self._share

    def _row(self, req: Any, cycles: tuple[list[int], list[int]]) -> dict[str, Any]:
        prompt, answer, params = req.origin_input_ids, req.output_ids_through_stop, req.sampling_params
        adapter = req.lora_id and self._lora_manager and self._lora_manager.lora_refs.get(req.lora_id)
        is_masked = req.grammar is not None or req.custom_logit_processor is not None
        return {
            "input_ids": [*prompt, *answer],
            "loss_mask": [0] * len(prompt) + [1] * len(answer),
            "accept_lens": cycles[0],
            "drafted": cycles[1],
            "temperature": 0.0 if params.top_k == 1 else float(params.temperature),
            "constrained": is_masked or bool(params.logit_bias),
            "lora": adapter.lora_name if adapter else "",
        }


_recorder: TrafficRecorder | None = None  # of this process's scheduler


def start_recording(target_worker: Any, on_count: Callable[[int], None]) -> TrafficRecorder | None:
    """Begin the record that the options request, on the first rank that has a request.

    Args:
        target_worker: SGLang's.
        on_count: as of `RecordWriter`.

    Returns:
        Who keeps the record. None: nobody does in this process.
    """
    global _recorder
    folder, parallel = DFlashOptions.RECORD.get(), get_parallel()
    if folder is not None and (parallel.attn_tp_rank, parallel.attn_cp_rank) == (0, 0):
        runner = target_worker.model_runner
        # The other ranks' open files may grow to their full size.
        limit = DFlashOptions.RECORD_LIMIT.get() - (parallel.num_dp_ranks - 1) * FILE_BYTES
        target = describe_target(runner.model_config.vocab_size, target_worker.tokenizer)
        name = f"dp{parallel.dp_rank or 0}-tp{parallel.tp_rank}"
        writer = RecordWriter(folder, limit=limit, target=target, name=name, on_count=on_count)
        share, is_opt_in = DFlashOptions.RECORD_SHARE.get(), DFlashOptions.RECORD_OPT_IN.get()
        _recorder = TrafficRecorder(writer, share, is_opt_in, runner.lora_manager)
    return _recorder


@patches(
    "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer.stream_output",
    at=WORKER,
    signature="(self, reqs, return_logprob, skip_req)",
    feature="--speculative-record",
    upstream="docs/dev/upstream/plugin-doors.md",
)
def record_output(
    original: Callable[..., None], streamer: Any, reqs: Sequence[Any], *args: Any, **kwargs: Any
) -> None:
    """Record requests that have ended: no other place of SGLang tells a worker which."""
    original(streamer, reqs, *args, **kwargs)
    if _recorder is not None:
        _recorder.on_output(reqs)
