"""The ledger of our changes to SGLang.

Each entry must fit the installed SGLang, and any mismatch must end the process.
"""

import dataclasses
import inspect

import pytest
import sglang  # noqa: F401  loads our platform plugin before any of SGLang's modules
from support.servers import run_to_end

from sglang_dflash import SGLANG_VERSION
from sglang_dflash.srt.hardware_backend.cpu import runtime
from sglang_dflash.srt.plugins import entry_points, install, ledger

CHANGES = (
    *ledger.AT_LOAD,
    *ledger.AT_FRONT_END,
    *ledger.AT_WORKER,
    *ledger.AT_DISAGGREGATION,
    *ledger.AT_CPU_DISAGGREGATION,
    *ledger.AT_CPU_ATTENTION,
)
# SGLang has no P-EAGLE model and no MLA on torch_native. Any other new key needs a reason of its own.
NEW_KEYS = {("models", "PEagleDraftModel"), ("_handlers", "torch_native")}


def name_of(change: ledger.Change) -> str:
    return change.name + (f"[{change.key}]" if change.key else "")


@pytest.mark.parametrize("change", [*CHANGES, *ledger.AT_HAND_OVER], ids=name_of)
def test_an_entry(change):
    """Check the entry's target, its reason and the signature of its hook."""
    install.check(change)
    _, target = install.resolve(change.target)
    assert len(change.why.split()) >= 4
    value = change.build()
    if change.kind == "entry":
        assert change.signature is None and change.key
        assert change.key in target or (change.name, change.key) in NEW_KEYS
        assert callable(value)
        return
    assert change.key is None
    if change.signature is None:  # a method of PyTorch, whose signature Python cannot inspect
        assert callable(target) and callable(value)
        return
    extra = {"around": ["original"], "resolution": [], "replace": [], "class": []}[change.kind]
    parameters = list(inspect.signature(value).parameters)
    if change.kind == "class":
        assert inspect.isclass(value) and set(change.parameters) <= set(parameters)
    elif change.kind == "resolution":
        assert parameters == [*change.parameters, "previous"]
    else:
        assert parameters == [*extra, *change.parameters]


def test_kinds_and_times():
    """Check the kinds of change at load and at the start of a worker.

    The plugin loads hooks, the config parser and the CPU attention. The parser leaves all other checkpoints
    to SGLang's. The CPU attention runs only models that SGLang's cannot (test_target_families.py). Functions
    that need Triton are replaced at load on a CPU only. Other replacements wait until a DFLASH worker starts.
    """
    replaced = [change for change in ledger.AT_LOAD if change.kind == "replace"]
    assert all(change.cpu_only for change in replaced)
    rest = [
        change
        for change in ledger.AT_LOAD
        if change not in replaced and change.key not in ("hf", "torch_native")
    ]
    assert {change.kind for change in rest} <= {"around", "resolution"}
    assert {change.kind for change in ledger.AT_WORKER} <= {"entry", "replace", "class"}


def test_no_target_is_listed_twice():
    targets = [(change.target, change.key) for change in CHANGES]
    assert len(targets) == len(set(targets))


EXAMPLE = next(change for change in ledger.AT_LOAD if change.target.endswith(".create_worker"))


@pytest.mark.parametrize(
    "target",
    [
        "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.no_such_method",
        "sglang.srt.speculative.spec_info.NoSuchClass.create_worker",
        "sglang.srt.speculative.no_such_module.create_worker",
        "no_such_package.create_worker",
    ],
)
def test_a_missing_target_ends_the_process(target):
    with pytest.raises(SystemExit, match="sglang-dflash") as caught:
        install.check(dataclasses.replace(EXAMPLE, target=target))
    assert target in str(caught.value) and EXAMPLE.why in str(caught.value)


@pytest.mark.parametrize("signature", ["(self)", "(self, server_args, more)", "(self, args)", "()"])
def test_another_signature_ends_the_process(signature):
    with pytest.raises(SystemExit, match="sglang-dflash") as caught:
        install.check(dataclasses.replace(EXAMPLE, signature=signature))
    assert signature in str(caught.value) and EXAMPLE.signature in str(caught.value)


def test_something_else_than_a_registry_ends_the_process():
    entry = next(change for change in CHANGES if change.kind == "entry")
    with pytest.raises(SystemExit, match="not a registry"):
        install.check(dataclasses.replace(entry, target=EXAMPLE.target))


def test_an_import_error_inside_sglang_is_not_taken_for_a_missing_target(tmp_path, monkeypatch):
    """A module that exists but cannot be imported must name the missing import."""
    (tmp_path / "broken_host.py").write_text("import module_that_is_not_installed\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit, match="module_that_is_not_installed"):
        install.check(dataclasses.replace(EXAMPLE, target="broken_host.function"))


def test_nothing_is_applied_when_one_check_fails(monkeypatch):
    """All targets are checked before the first replacement is built."""
    built = []
    changes = [dataclasses.replace(change, build=lambda: built.append(1)) for change in ledger.AT_LOAD]
    broken = dataclasses.replace(EXAMPLE, signature="(nothing)")
    monkeypatch.setattr(ledger, "AT_LOAD", (*changes, broken))
    with pytest.raises(SystemExit):
        install.install_at_load()
    assert not built


@pytest.fixture
def registry(monkeypatch) -> dict[str, str]:
    """Registry that `entry_of_registry` changes."""
    registry = {"key": "stock", "cpu key": "stock"}
    resolve = install.resolve
    monkeypatch.setattr(
        install, "resolve", lambda path: (None, registry) if path == "fake.registry" else resolve(path)
    )
    return registry


def entry_of_registry(key: str, cpu_only: bool = False) -> ledger.Change:
    entry = next(change for change in CHANGES if change.kind == "entry")
    return dataclasses.replace(
        entry, target="fake.registry", key=key, cpu_only=cpu_only, build=lambda: "ours"
    )


def test_worker_changes_are_checked_before_the_first_is_applied(registry):
    broken = dataclasses.replace(EXAMPLE, kind="replace", signature="(nothing)")
    with pytest.raises(SystemExit):
        install.install((entry_of_registry("key"), broken))
    assert registry["key"] == "stock"
    install.install((entry_of_registry("key"),))
    assert registry["key"] == "ours"


@pytest.mark.parametrize("active", [True, False])
def test_cpu_changes_are_made_on_the_cpu_only(active, registry, monkeypatch):
    monkeypatch.setattr(runtime, "is_active", lambda: active)
    install.install((entry_of_registry("cpu key", cpu_only=True), entry_of_registry("key")))
    assert registry == {"key": "ours", "cpu key": "ours" if active else "stock"}


def test_another_sglang_ends_the_process(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda package: "0.5.24")
    with pytest.raises(SystemExit) as caught:
        entry_points.install()
    assert "0.5.24" in str(caught.value) and SGLANG_VERSION in str(caught.value)


def test_an_exception_becomes_the_end_of_the_process(monkeypatch):
    def fail():
        raise ValueError("half a hook")

    monkeypatch.setattr(install, "install_at_load", fail)
    with pytest.raises(SystemExit, match="half a hook"):
        entry_points.install()


IMPORTED_BEFORE = """
import sys
import sglang.srt.managers.scheduler
from sglang.srt.layers.attention import hybrid_linear_attn_backend
from sglang_dflash.srt.hardware_backend.cpu import runtime
from sglang_dflash.srt.plugins import install, ledger
from sglang.srt.plugins import load_plugins
changes = [change for change in ledger.AT_LOAD if change.kind == "replace"]
assert all(change.cpu_only for change in changes)
targets = {change.target: install.resolve(change.target)[1] for change in changes if runtime.is_active()}
load_plugins()
for target, old in targets.items():
    assert install.resolve(target)[1] is not old, target
    for path, module in sys.modules.items():
        for name, value in list(vars(module).items()) if path.startswith("sglang.") else ():
            assert value is not old, f"{path}.{name} is still SGLang's"
importers = hybrid_linear_attn_backend.__dict__.keys() & {target.rpartition(".")[2] for target in targets}
print("imported before:", *importers)
"""


def test_names_imported_before_the_plugin_are_replaced_too():
    done = run_to_end("-c", IMPORTED_BEFORE)
    assert done.code == 0 and "imported before: " in done.output, done.output
    if runtime.is_active():
        assert "scatter_mamba_states_after_mtp_verify" in done.output, (
            "nothing was imported before the plugin, so the test proves nothing"
        )


PRELUDE = "import sglang; from sglang.srt.plugins import load_plugins; "
FAILURES = {
    "nothing wrong": ("pass", None),
    "an exception": (
        "from sglang_dflash.srt.plugins import install; install.install_at_load = lambda: 1 / 0",
        "ZeroDivisionError",
    ),
    "another version": (
        "import sglang_dflash.srt.plugins.entry_points as e; e.SGLANG_VERSION = '9.9'",
        "9.9",
    ),
    "another signature": (
        "from sglang.srt.speculative.spec_info import SpeculativeAlgorithm; "
        "SpeculativeAlgorithm.create_worker = lambda self, a, b: 0",
        "create_worker",
    ),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_sglang_does_not_go_on_with_half_a_plugin(failure):
    """SGLang logs a plugin's exception and continues; SystemExit ends it."""
    sabotage, word = FAILURES[failure]
    program = f"{PRELUDE}{sabotage}; load_plugins(); print('went on')"
    done = run_to_end("-c", program)
    if word is None:
        assert done.code == 0 and "went on" in done.output, done.output
        return
    assert done.code != 0 and "went on" not in done.output
    last_line = done.output.strip().splitlines()[-1]
    assert "sglang-dflash" in last_line and word in done.output, done.output
