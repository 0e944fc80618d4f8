"""A second plugin on the same hooks, loaded before ours and after it: both work."""

import json

import pytest
from serving import TARGET, dflash_arguments
from support.servers import run_to_end

# SGLang finds the second plugin as an entry point. Prints what the launcher and a scheduler come to.
PROGRAM = """
import functools
import json
import logging
from types import SimpleNamespace

from sglang.srt import plugins

ORDER, ARGUMENTS, STEPS = json.loads('SETTINGS')
REPLACED = "sglang.srt.managers.scheduler.validate_dflash_request"
WRAPPED = [
    "sglang.srt.managers.scheduler.Scheduler.handle_generate_request",
    "sglang.srt.managers.io_struct.GenerateReqInput.normalize_batch_and_arguments",
]
FLAGS = "sglang.srt.server_args.ServerArgs.add_cli_args"
calls, warned = [], []
listener = logging.Handler(logging.WARNING)
listener.emit = lambda record: warned.append(record.getMessage())
logging.getLogger("sglang_dflash").addHandler(listener)


def around(original, *args, **kwargs):
    calls.append(original.__name__)
    return original(*args, **kwargs)


def second():
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import ServerArgs

    for target in (REPLACED, *WRAPPED, FLAGS):
        HookRegistry.register(target, around, HookType.AROUND)
    add_cli_args = ServerArgs.add_cli_args

    @functools.wraps(add_cli_args)
    def add_one_more(parser):
        add_cli_args(parser)
        parser.add_argument("--second")

    ServerArgs.add_cli_args = staticmethod(add_one_more)
    for step in STEPS:
        register_resolution_hook(step)(functools.partial(take_step, step))


def take_step(step, server_args, previous):
    calls.append(step)
    previous(server_args)


find = plugins.entry_points
points = {
    "dflash": next(point for point in find(group="sglang.srt.plugins") if point.name == "dflash"),
    "second": SimpleNamespace(name="second", value="second", dist=None, load=lambda: second),
}
plugins.entry_points = lambda group: (
    [points[name] for name in ORDER] if group == "sglang.srt.plugins" else find(group=group)
)
plugins.load_plugins()

from sglang.srt.arg_groups.model_override_base import resolved_view
from sglang.srt.server_args import prepare_server_args

from sglang_dflash.srt import patching
from sglang_dflash.srt.plugins import algorithm

args = prepare_server_args(ARGUMENTS)
args.resolve_once()
worker = algorithm.prepare_scheduler()


def chain(target):
    _, function = patching.resolve(target)
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


answer = {
    "served": type(resolved_view(args).speculative_algorithm).__name__,
    "worker": worker.__module__,
    "calls": sorted(calls),
    "warned": warned,
    "replaced by": patching.resolve(REPLACED)[1].__module__,
    "wrappers": {target: len(list(chain(target))) - 1 for target in WRAPPED},
}
print("ANSWER", json.dumps(answer))
"""
STEPS = ("handle_deprecated_dp_attention", "handle_speculative_decoding")


@pytest.mark.parametrize("order", [("dflash", "second"), ("second", "dflash")], ids="-".join)
def test_both_plugins_work(order):
    """DFLASH is ours, with its flags, without a warning. The second one's flag and wrappers are there too."""
    arguments = [
        "--model-path",
        str(TARGET),
        *dflash_arguments(),
        "--speculative-copy-ahead",
        "--second",
        "x",
    ]
    settings = json.dumps([order, arguments, STEPS])
    done = run_to_end("-c", PROGRAM.replace("SETTINGS", settings), environment={"SGLANG_PLUGINS": ""})
    lines = [line for line in done.output.splitlines() if line.startswith("ANSWER ")]
    assert done.code == 0 and lines, done.output[-4000:]
    answer = json.loads(lines[0].removeprefix("ANSWER "))
    assert (answer["served"], answer["warned"]) == ("ServedName", [])
    assert answer["worker"] == "sglang_dflash.srt.speculative.dflash_worker"
    assert answer["calls"] == sorted([*STEPS, "add_cli_args"])
    assert answer["replaced by"].startswith("sglang_dflash.")
    assert set(answer["wrappers"].values()) == {2}, "ours around theirs"
