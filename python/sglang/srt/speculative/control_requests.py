"""Checks of control requests in SGLang's front end.

SGLang's scheduler catches no error of a control request: the first one ends the server. What would raise
there is answered with HTTP 400, by name.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import HTTPException
from sglang.srt.managers import io_struct
from sglang.srt.runtime_context import get_device, get_exec

# What `torch.profiler` records on a CPU; SGLang's default has both.
_CPU_ACTIVITIES = {"CPU", "GPU"}
_LOG_LEVELS = range(4)  # of requests, in SGLang's RequestLogger


class RefusedControl(HTTPException, RuntimeError):
    """HTTP 400 to a control request; SGLang's callers in Python expect a RuntimeError."""

    def __init__(self, problem: str):
        super().__init__(status_code=400, detail=problem)

    def __str__(self) -> str:
        return self.detail  # some of SGLang's endpoints answer with the text of an error


def check_and_dispatch(dispatch_to_scheduler: Callable[..., None], manager: Any, obj: Any) -> None:
    """Check a control request first, in `TokenizerManager._dispatch_to_scheduler`."""
    if problem := find_control_problem(obj):
        raise RefusedControl(problem)
    dispatch_to_scheduler(manager, obj)


def find_control_problem(obj: Any) -> str | None:
    """Return why the scheduler could not run this control request of SGLang's, or None."""
    return _CHECKS.get(type(obj), lambda _: None)(obj)


async def answer_profile_errors(execute_profile: Callable[..., Any], manager: Any, req: Any) -> Any:
    """Answer a profile that fails, in `TokenizerControlMixin._execute_profile`."""
    try:
        return await execute_profile(manager, req)
    except RuntimeError as error:
        raise RefusedControl(str(error)) from error


def check_and_configure_logging(configure_logging: Callable[..., None], manager: Any, obj: Any) -> None:
    """Check the level of request logs, in `TokenizerManager.configure_logging`.

    SGLang accepts any level, and then answers each request with HTTP 500.
    """
    level = obj.log_requests_level
    if level is not None and level not in _LOG_LEVELS:
        raise RefusedControl(f"log_requests_level: {level} is not in 0 to {_LOG_LEVELS[-1]}.")
    configure_logging(manager, obj)


def is_on_cpu() -> bool:
    """Return whether the server's device is a CPU."""
    return get_device().device == "cpu"


def _needs_gpu(what: str) -> Callable[[Any], str | None]:
    return lambda obj: f"{what} needs a GPU. This server runs on a CPU." if is_on_cpu() else None


def _profile_problem(obj: Any) -> str | None:
    if obj.req_type != io_struct.ProfileReqType.START_PROFILE:
        return None
    if is_on_cpu() and obj.activities is not None:
        if "CPU" not in obj.activities or set(obj.activities) - _CPU_ACTIVITIES:
            return f"activities: {obj.activities} cannot be recorded on a CPU, which records ['CPU']."
    for name in ("profile_id", "profile_prefix"):
        if "/" in (getattr(obj, name) or ""):
            return f"{name}: {getattr(obj, name)!r} is no part of a file's name."
    folder = Path(obj.output_dir or os.getenv("SGLANG_TORCH_PROFILER_DIR", "/tmp")).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)  # as SGLang does at the end of the profile
    except OSError as error:
        return f"output_dir: {error}."
    return None if os.access(folder, os.W_OK) else f"output_dir: {folder} cannot be written to."


def _expert_record_problem(obj: Any) -> str | None:
    if get_exec().moe.expert_distribution_recorder_mode is None:
        return "Expert distributions are recorded with --expert-distribution-recorder-mode alone."
    return None


def _update_group_problem(obj: Any) -> str | None:
    if not obj.group_name:
        return "group_name: a group needs a name."
    if obj.backend == "nccl" and is_on_cpu():
        return "backend: 'nccl' needs a GPU. This server runs on a CPU: use 'gloo'."
    if not 0 <= obj.rank_offset < obj.world_size:
        return f"rank_offset: {obj.rank_offset} is not in 0 to {obj.world_size - 1}."
    return None


def _weights_check_problem(obj: Any) -> str | None:
    return _needs_gpu("Comparing weights with their snapshot")(obj) if obj.action == "compare" else None


_REMOTE_INSTANCE = _needs_gpu("Sending weights to a remote instance (NCCL)")
_CHECKS: dict[type, Callable[[Any], str | None]] = {
    io_struct.ReleaseMemoryOccupationReqInput: _needs_gpu("Releasing memory (SGLang's memory saver)"),
    io_struct.ResumeMemoryOccupationReqInput: _needs_gpu("Resuming memory (SGLang's memory saver)"),
    io_struct.InitWeightsSendGroupForRemoteInstanceReqInput: _REMOTE_INSTANCE,
    io_struct.SendWeightsToRemoteInstanceReqInput: _REMOTE_INSTANCE,
    io_struct.InitWeightsUpdateGroupReqInput: _update_group_problem,
    io_struct.CheckWeightsReqInput: _weights_check_problem,
    io_struct.ExpertDistributionReq: _expert_record_problem,
    io_struct.ProfileReq: _profile_problem,
}
