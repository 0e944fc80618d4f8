"""Processes that ours does not serve: what is changed in them, ranks that differ, another SGLang."""

import json

import pytest
from serving import DRAFT, TARGET
from support.parity import assert_same
from support.servers import PLAIN_FLOAT32, patched, plain_target, run_to_end

from sglang_dflash.srt import patching
from sglang_dflash.srt.hardware_backend.cpu import runtime
from sglang_dflash.srt.patching import FALLBACK, FRONT_END, LOAD, WORKER
from sglang_dflash.srt.plugins.patches import patches_at

# A launcher and two schedulers of one server, on a pretended GPU. Prints what differs from the state before
# the plugin was loaded, which is that of SGLANG_PLUGINS=none: every function, class, method and entry of a
# dictionary in all loaded modules of SGLang, compared by identity.
PATCHED = """
import json
import logging
import pickle
import sys

import sglang
from sglang_dflash.srt import environ
from sglang_dflash.srt.environ import DFlashOptions
from sglang_dflash.srt import patching
from sglang_dflash.srt.plugins import entry_points, patches

for entry in patches.all_patches():
    if not entry.is_for_cpu:
        patching.resolve(entry.target)
import sglang.srt.speculative.dflash_worker_v2


def names_in(path, holder):
    for name, value in list(vars(holder).items()):
        if isinstance(value, dict) and not name.startswith("__"):
            yield from ((f"{path}.{name}[{key}]", entry) for key, entry in list(value.items()))
        elif callable(value) or isinstance(value, staticmethod | classmethod):
            yield f"{path}.{name}", value


def contents():
    found = {}
    for path, module in list(sys.modules.items()):
        if not path.startswith("sglang."):
            continue
        found |= names_in(path, module)
        for name, value in list(vars(module).items()):
            holder = value if isinstance(value, type) else type(value)
            if holder.__module__ == path and hasattr(value, "__dict__"):
                found |= names_in(f"{path}.{name}", value)
    return found


def differing(before):
    now = contents()
    return sorted(name for name, value in before.items() if now.get(name, value) is not value)


environ.serves_on_stand_in = lambda: False
from sglang.srt.arg_groups import resolution_hooks, speculative_hook
from sglang.srt.arg_groups.model_override_base import resolved_view
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

arguments = dict(
    model_path=TARGET,
    device="cuda",
    attention_backend="fa3",
    page_size=1,
    speculative_algorithm="DFLASH",
    speculative_draft_model_path=DRAFT,
    speculative_draft_model_revision="main",
)
before = contents()
hooks_before = dict(resolution_hooks._HOOKS)
entry_points.patch_at_load()
entry_points.register_at_load()
loaded = differing(before)


def serve(**more):
    record = ServerArgs(**arguments, **more)
    resolution_hooks.run_hook(speculative_hook.handle_speculative_decoding, record)
    workers = set()
    if DFlashOptions.FALLBACK.get():
        patching.install(patches.patches_at(patching.FALLBACK))  # as children do when they load the plugin
    for _ in range(2):
        scheduler = pickle.loads(pickle.dumps(record))
        served = SpeculativeAlgorithm.from_string(resolved_view(scheduler).speculative_algorithm)
        workers.add(served.create_worker(scheduler).__module__)
    return [*workers, *(name for name in differing(before) if name not in loaded)]


fallback = serve(attn_cp_size=2, disaggregation_mode="decode")
answer = {"loaded": loaded, "fallback": fallback, "ours": serve(), "known": list(before)}
print("ANSWER", json.dumps(answer))
"""


def test_a_fallback_has_sglangs_own_functions():
    program = PATCHED.replace("=TARGET", f"={str(TARGET)!r}").replace("=DRAFT", f"={str(DRAFT)!r}")
    done = run_to_end("-c", program)
    [answer] = [line for line in done.output.splitlines() if line.startswith("ANSWER ")] or [done.output]
    found = json.loads(answer.removeprefix("ANSWER "))
    wanted = {entry.target for entry in patches_at(LOAD) if not entry.is_for_cpu}
    wanted.add("sglang.srt.configs.model_config_parser_registry._MODEL_CONFIG_PARSER_REGISTRY[hf]")
    changed = {name for name in found["loaded"] if "resolution_hooks" not in name}
    assert changed == wanted
    [report] = patches_at(FALLBACK)
    worker, *changed = found["fallback"]
    assert worker == "sglang.srt.speculative.dflash_worker_v2"
    assert changed == [report.target]
    worker, *changed = found["ours"]  # control: the same program finds what ours changes
    assert worker == "sglang_dflash.srt.speculative.dflash_worker"
    ours = patching.relevant((*patches_at(FRONT_END), *patches_at(WORKER)))
    assert {entry.target for entry in ours if not entry.is_for_cpu} <= set(changed)
    assert "sglang.srt.models.registry.ModelRegistry.models[DFlashDraftModel]" in changed


@pytest.mark.server
@pytest.mark.skipif(not runtime.needs_stand_in(), reason="a stock server on a GPU is not ours to test")
def test_another_sglang_serves_without_dflash(reference, servers):
    """Pretend a version whose `add_cli_args` has other parameters, and that ours needs it."""
    servers.close()
    sampling = {"temperature": 0, "max_new_tokens": 16}
    requests = [{"text": text, "sampling_params": sampling} for text in ("def add(a, b):", "import os\n")]
    with plain_target(*PLAIN_FLOAT32, environment=patched("another_sglang")) as plain:
        assert_same(requests, plain.server.generate_many(requests, 2), reference.answers(requests))
        log = plain.server.log()
    assert log.count("is off, because it does not fit SGLang 0.5.99") == 1
    assert "takes (parser), expected (parser, more)" in log
