"""The host's time in a cycle: what `benchmark/host_time.py` compares, and the names that it replaces."""

import json

import host_time
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache import allocation
from sglang.srt.speculative import dflash_utils
from support.rehearsal import faults, graphs, launches, stage, steps
from triton.runtime.interpreter import InterpretedFunction

from sglang_dflash.srt.speculative.acceptance.acceptor import SimulatedAcceptance


def test_host_time_compares_rounds_with_the_built_ins():
    ours = [[2.0] * 8 + [0.1, 90.0], [6.0] * 10, [3.0] * 10]
    built_in = [[4.0] * 10, [8.0] * 10, [4.0] * 10]
    found = host_time.summary(ours, built_in)
    assert (found["ratio"], found["ratio_least"], found["ratio_most"]) == (0.75, 0.5, 0.75)
    assert found["cycles"] == 30 and "ratio" not in host_time.summary(ours, None)
    rows = [
        {"backend": "flashinfer", "requests": 1, "server": host_time.OURS, **found},
        {"backend": "fa3", "requests": 1, "server": host_time.OURS, **host_time.summary(ours, None)},
    ]
    heading = {
        "date": "today",
        "command": "host_time.py",
        "machine": "a machine",
        "load": "2.0",
        "versions": {"sglang": "0"},
    }
    page = host_time.page(heading, rows)
    assert "| flashinfer | 1 | ours | 3.75 | 0.75 | 0.50 to 0.75 | 30 |" in page
    assert "| fa3 | 1 | ours | 3.75 | – | – | 30 |" in page


def test_host_time_stays_on_the_rehearsals_stage(tmp_path):
    """The probe replaces these by name."""
    environment = host_time.environment("fa3", host_time.PLAIN, tmp_path)
    assert stage.Scene(**json.loads(environment["REHEARSAL"])).backend == "fa3"
    assert "HOST_TIME_PLAIN" in environment and "SGLANG_SIMULATE_ACC_LEN" not in environment
    for owner, names in (
        (stage, ("_interpret_triton", "_flashinfer", "_fa3", "_capture_graphs", "flash_attn_with_kvcache")),
        (stage, ("_note_bounds",)),
        (steps, ("watch",)),
        (allocation, ("assign_req_to_token_pool_func",)),
        (dflash_utils, ("apply_dflash_simulated_acceptance",)),
        (SimulatedAcceptance, ("override",)),
        (launches, ("one_operation", "watch_decode_steps")),
        (graphs.GraphBackend, ("replay", "replays")),
        (faults, ("PLANTED",)),
        (InterpretedFunction, ("run",)),
        (Scheduler, ("ingest_requests", "run_batch")),
    ):
        assert all(hasattr(owner, name) for name in names), owner
