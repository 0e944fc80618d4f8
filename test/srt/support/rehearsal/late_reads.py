"""Reads of SGLang's tables by request row, behind the forward after which SGLang may rewrite them.

SGLang gives the row of a request that has ended to another one once the target's forward has read its tables
(`shared_read_done_event`). A step that reads one later has to take that event away. SGLang then waits for the
whole step.
"""

from typing import Any

from support.rehearsal import launches, report
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_step: "_Step | None" = None


class _Step(TorchDispatchMode):
    """A step of the worker. late: reads after the event, by the line that asks for them."""

    def __init__(self, worker: Any):
        super().__init__()
        self.runner = worker.last_shared_read_runner
        self.late: set[str] = set()
        self._tables = set(_tables(worker))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        if name not in launches.FREE:
            self.on_operation(name, (args, kwargs))
        return func(*args, **(kwargs or {}))

    def on_operation(self, name: str, arguments: Any) -> None:
        if self.runner.shared_read_done_event is None:
            return
        for leaf in tree_leaves(arguments):
            if hasattr(leaf, "untyped_storage") and leaf.untyped_storage().data_ptr() in self._tables:
                self.late.add(f"{name} <- {launches.asking_line()}")


def _tables(worker: Any):
    """Yield the addresses of the tables that SGLang rewrites."""
    for runner in (worker.target_worker.model_runner, worker.draft_worker.model_runner):
        pool = runner.req_to_token_pool
        states = getattr(pool, "mamba_pool", None)
        cursors = ("replayssm_spec_write_pos", "replayssm_cache_base", "replayssm_is_flush")
        for table in (
            pool.req_to_token,
            getattr(pool, "req_index_to_mamba_index_mapping", None),
            *(getattr(states, name, None) for name in cursors),
        ):
            if table is not None:
                yield table.untyped_storage().data_ptr()


def on_kernel(name: str, arguments: Any) -> None:
    """Look at the arguments of a kernel that is launched."""
    if _step is not None:
        _step.on_operation(name, arguments)


def watch_steps(worker: type) -> None:
    """Report each step that reads a table late and lets SGLang rewrite it."""
    run = worker.forward_batch_generation
    has_run = False

    def watched(self, *args, **kwargs):
        nonlocal has_run
        global _step
        runner = self.last_shared_read_runner
        if not has_run and runner.shared_read_done_event is not None:
            report.problem("start-up leaves an event, which SGLang would take for the first step's")
        has_run, runner.shared_read_done_event = True, None  # SGLang has waited for the last step's
        _step = step = _Step(self)
        try:
            with step:
                return run(self, *args, **kwargs)
        finally:
            _step = None
            if step.late and runner.shared_read_done_event is not None:
                report.problem(f"read when SGLang may have rewritten it: {sorted(step.late)}")

    worker.forward_batch_generation = watched
