"""Times the host's part of each decode cycle in a rehearsed server, for `host_time.py`.

Python imports this file at start-up if its folder is on PYTHONPATH. It runs the tests' server patches, which
set the rehearsal's stage. Graphs do nothing when they are replayed. Taken out are the stand-ins for kernels,
eager matrix products, the simulation of accept lengths, and the tests' own checks. What is left is the
scheduler thread's CPU time for Python, plans and small tensor operations. HOST_TIME names the file that times
are written to. HOST_TIME_PLAIN=1: no speculation.
"""

import contextlib
import functools
import json
import os
import runpy
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WRITE_EVERY_S = 0.5


class Clock:
    """CPU time of the calling thread without its operations of a GPU."""

    def __init__(self):
        self._spent = 0.0

    def now(self) -> float:
        return time.thread_time() - self._spent

    def set(self, now: float) -> None:
        """Go back to an earlier time, so that what was between is not counted."""
        self._spent = time.thread_time() - now

    @contextlib.contextmanager
    def uncounted(self, name: str):
        """Take the block out; in the rehearsal it is one operation on a GPU."""
        begun = self.now()
        try:
            yield
        finally:
            self.set(begun)


CLOCK = Clock()


def uncounted(body):
    """Wrap a function whose time is taken out."""

    @functools.wraps(body)
    def run(*args, **kwargs):
        begun = CLOCK.now()
        try:
            return body(*args, **kwargs)
        finally:
            CLOCK.set(begun)

    return run


class Loop:
    """Iterations of the scheduler's loop that launched a decode batch."""

    def __init__(self):
        self.seconds: dict[int, list[float]] = {}  # by batch size
        self._begun, self._size = 0.0, None

    def next(self) -> None:
        now = CLOCK.now()
        if self._size is not None:
            self.seconds.setdefault(self._size, []).append(now - self._begun)
        self._begun, self._size = now, None

    def ran(self, batch) -> None:
        self._size = len(batch.reqs) if batch.forward_mode.is_decode() else None


def watch_scheduler(module) -> None:
    """Time every pass of the loop, from one look for new requests to the next."""
    loop, scheduler = Loop(), module.Scheduler
    ingest, run_batch = scheduler.ingest_requests, scheduler.run_batch

    @functools.wraps(ingest)
    def timed_ingest(self, *args, **kwargs):
        loop.next()
        return ingest(self, *args, **kwargs)

    @functools.wraps(run_batch)
    def noted_run(self, batch, *args, **kwargs):
        loop.ran(batch)
        return run_batch(self, batch, *args, **kwargs)

    scheduler.ingest_requests, scheduler.run_batch = timed_ingest, noted_run
    threading.Thread(target=_write, args=(loop,), daemon=True).start()


def _write(loop: Loop) -> None:
    path = Path(os.environ["HOST_TIME"])
    while True:
        time.sleep(WRITE_EVERY_S)
        if loop.seconds:
            partial = path.with_suffix(".part")
            partial.write_text(json.dumps(loop.seconds))
            os.replace(partial, path)


def free_the_gpu(compiled, crossings, faults, graphs, late_reads, launches, stage, steps) -> None:
    """Take the GPU's work out of the rehearsal, and the tests' own part of it."""
    import torch
    from triton.runtime.interpreter import InterpretedFunction

    def replay(self, shape_key, *_, **__):
        self.replays[self._role] += 1
        return self._outputs[shape_key]

    InterpretedFunction.run = uncounted(InterpretedFunction.run)  # the interpreter's preparation too
    torch.nn.functional.linear, torch.mm = uncounted(torch.nn.functional.linear), uncounted(torch.mm)
    faults.PLANTED.clear()  # they look into a file several times a cycle
    steps.watch = stage._note_bounds = lambda: None
    launches.one_operation = CLOCK.uncounted
    launches.watch_decode_steps = late_reads.watch_steps = crossings.watch = lambda worker: None
    compiled.on_launch = lambda *_: None
    graphs.GraphBackend.replay = replay


def taking_out(name: str):
    """Return a change of a module that takes a function's time out. name: within the module, with dots."""
    *owners, attribute = name.split(".")

    def change(module) -> None:
        owner = functools.reduce(getattr, owners, module)
        setattr(owner, attribute, uncounted(getattr(owner, attribute)))

    return change


def set_a_plain_stage(stage, _) -> None:
    """Set the stage of a server without speculation: SGLang's backend and graphs for the target."""
    scene = stage.Scene.from_environment()

    def build():
        stage._interpret_triton()
        attend = stage.flash_attn_with_kvcache

        def attend_plainly(*args, **kwargs):
            unread = ("scheduler_metadata", "max_seqlen_k", "sinks", "k_descale", "v_descale")
            with CLOCK.uncounted("attention"):
                return attend(*args, **{name: value for name, value in kwargs.items() if name not in unread})

        stage.flash_attn_with_kvcache = attend_plainly
        backend = {"flashinfer": stage._flashinfer, "fa3": stage._fa3}[scene.backend]()
        stage._capture_graphs(scene.buckets)
        return backend

    from sglang_dflash.srt.plugins import entry_points

    entry_points.cpu_attention = lambda runner: build()(runner)


if "HOST_TIME" in os.environ:
    runpy.run_path(str(ROOT / "test" / "srt" / "support" / "server_patches" / "sitecustomize.py"))
    sys.path.append(str(ROOT / "benchmark"))
    from after_import import after_import
    from support.rehearsal import compiled, crossings, faults, graphs, late_reads, launches, stage, steps

    free_the_gpu(compiled, crossings, faults, graphs, late_reads, launches, stage, steps)
    if os.environ.get("HOST_TIME_PLAIN"):
        stage.set_the_stage = functools.partial(set_a_plain_stage, stage)
    after_import(
        {
            "sglang.srt.managers.scheduler": watch_scheduler,
            "sglang.srt.mem_cache.allocation": taking_out("assign_req_to_token_pool_func"),
            # The simulation, of the built-in and of ours.
            "sglang.srt.speculative.dflash_utils": taking_out("apply_dflash_simulated_acceptance"),
            "sglang_dflash.srt.speculative.acceptance.simulation": taking_out("Simulation.decide"),
        }
    )
