"""Start a rehearsed server, send requests, and read its report."""

import contextlib
import dataclasses
import functools
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from serving import TARGET, WHOLE_BLOCKS, Server, dflash_arguments, serve
from support.rehearsal import faults, report, stage
from support.servers import COUNTED, ENVIRONMENT, patched
from support.warm_start import ForkServer

from sglang_dflash.srt.environ import DFlashOptions
from sglang_dflash.srt.hardware_backend.cpu import runtime

# Triton decides while it is imported whether it interprets.
INTERPRETED = {"TRITON_INTERPRET": "1"}
on_cpu = pytest.mark.skipif(not runtime.needs_stand_in(), reason="rehearses what this machine can run")
# A small pool: Triton's interpreter and the attention stand-ins take their time with it.
ARGUMENTS = (
    "--dtype", "float32", "--random-seed", "7", "--max-total-tokens", "2048", "--context-length", "512",
    "--max-running-requests", "4", "--sampling-backend", "pytorch", "--sleep-on-idle", WHOLE_BLOCKS,
)  # fmt: skip
START_TIMEOUT_S = 900
PADDING = "reset_padding"  # the function of SGLang that clears the rows which pad a batch


@dataclass
class Rehearsal:
    server: Server
    folder: Path

    def notes(self, kind: str) -> list[dict[str, Any]]:
        """Return what the server reported of this kind since the last `forget`."""
        notes = map(json.loads, (self.folder / "report").read_text().splitlines())
        return [note for note in notes if note["kind"] == kind]

    def forget(self) -> None:
        (self.folder / "report").write_text("")

    def plant(self, fault: str) -> None:
        """Plant one of `faults.PLANTED` from the next step on, or none for an empty name."""
        (self.folder / "fault").write_text(fault)

    def state(self) -> dict[str, Any]:
        """Return what `/server_info` says of the scheduler."""
        [state] = self.server.get("/server_info")["internal_states"]
        return state

    def problems(self) -> list[str]:
        return [note["text"] for note in self.notes("problem")]

    def steps_without_graphs(self) -> list[dict[str, Any]]:
        """Return decode steps that did not replay one graph of the target and one of the draft."""
        return [step for step in self.notes("step") if step["replays"] != {"target": 1, "draft": 1}]

    def waits(self) -> list[str]:
        """Return what the host waited for in decode steps."""
        return [note["what"] for note in self.notes("wait")]

    def orders(self) -> list[list[str]]:
        """Return, for each decode step, its waits, plans and replays since the lengths were published."""
        orders = [note["events"] for note in self.notes("order")]
        return [events for events in orders if "target" in events]

    def operations(self) -> list[dict[str, int]]:
        """Return every set of operations of a step, each with its count.

        Operations that pad a batch to its graph's size are left out.
        """
        found = []
        for note in self.notes("operations"):
            counts = {name: count for name, count in note["counts"].items() if PADDING not in name}
            if counts not in found:
                found.append(counts)
        return found


@functools.cache
def fork_server() -> ForkServer:
    return ForkServer.start({**COUNTED, **INTERPRETED})


@contextlib.contextmanager
def rehearse(
    scene: stage.Scene, draft: Path, *arguments: object, environment: dict[str, str] | None = None
) -> Iterator[Rehearsal]:
    """Serve with CUDA's attention and graphs on CPU tensors."""
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as name:
        folder = Path(name)
        env = {
            **ENVIRONMENT,
            **INTERPRETED,
            **patched("rehearsal"),
            stage.VARIABLE: json.dumps(dataclasses.asdict(scene)),
            report.VARIABLE: str(folder / "report"),
            faults.VARIABLE: str(folder / "fault"),
            DFlashOptions.WAIT_UNDER_DRAFT.variable: str(int(scene.waits_under_draft)),
            **(environment or {}),
        }
        command = "--model-path", TARGET, *ARGUMENTS, *dflash_arguments(draft), *arguments
        start = fork_server().run_main
        (folder / "report").touch(), (folder / "fault").touch()
        with serve(*command, env=env, timeout=START_TIMEOUT_S, start=start) as server:
            yield Rehearsal(server, folder)
