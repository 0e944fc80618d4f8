"""A server that says what its decode steps took; an adaptive one also verifies a given width, or chooses for itself again, while it
runs. Python imports this at start-up wherever its folder is on PYTHONPATH; used by benchmark/adaptive.py.

The file that WIDTH_SWITCH names holds the number of slots to verify, or nothing. What is verified because of it teaches the policy
nothing. /server_info says, as "busy": decode_seconds, decode_tokens and prefill_seconds since the start, idle time left out."""

import os
import sys
import time
from pathlib import Path


def put_in(module) -> None:
    path = Path(os.environ["WIDTH_SWITCH"])
    chooser = module.WidthChooser
    ask, kept, took = chooser.ask, chooser.kept, chooser.took

    def told() -> int:
        return int(path.read_text() or 0)

    def asked(self, slots, modes):
        width = told()
        if not width:
            return ask(self, slots, modes)
        nothing = 0.0 * self.costs.widths
        return module.Choice(width, self.costs.widths.tolist().index(width), False, nothing, nothing)

    def is_kept(self, *cycle):
        if not told():
            kept(self, *cycle)

    def has_taken(self, *cycle):
        return 0.0 if told() else took(self, *cycle)

    chooser.ask, chooser.kept, chooser.took = asked, is_kept, has_taken


def time_steps(module) -> None:
    """Time goes to the kind of the batch launched last, until the next is launched or there is none."""
    scheduler = module.Scheduler
    run_batch, process, on_idle, state = (
        scheduler.run_batch,
        scheduler.process_batch_result,
        scheduler.on_idle,
        scheduler.get_internal_state,
    )
    busy = {"decode_seconds": 0.0, "prefill_seconds": 0.0, "decode_tokens": 0}
    kind, since = "", 0.0

    def now_is(new: str) -> None:
        nonlocal kind, since
        now = time.perf_counter()
        if kind:
            busy[kind] += now - since
        kind, since = new, now

    def launched(self, batch, *rest, **named):
        now_is("decode_seconds" if batch.forward_mode.is_decode() else "prefill_seconds")
        return run_batch(self, batch, *rest, **named)

    def processed(self, batch, result):
        before = sum(len(req.output_ids) for req in batch.reqs)
        decoded = batch.forward_mode.is_decode()
        process(self, batch, result)
        if decoded:
            busy["decode_tokens"] += sum(len(req.output_ids) for req in batch.reqs) - before

    def idle(self):
        now_is("")
        on_idle(self)

    def told(self, request):
        answer = state(self, request)
        answer.internal_state["busy"] = dict(busy)
        return answer

    scheduler.run_batch, scheduler.process_batch_result = launched, processed
    scheduler.on_idle, scheduler.get_internal_state = idle, told


sys.path.append(str(Path(__file__).parent.parent))
from after_import import after_import  # noqa: E402

after_import(
    {
        "sglang_dflash.srt.speculative.width.chooser": put_in,
        "sglang.srt.managers.scheduler": time_steps,
    }
)
