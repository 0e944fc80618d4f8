"""The ledger of our changes to SGLang.

Each entry must fit the installed SGLang. A mismatch must leave the server to SGLang, whole.
"""

import dataclasses
import inspect
import pickle
import sys
from types import SimpleNamespace

import pytest
import sglang  # noqa: F401  loads our platform plugin before any of SGLang's modules
from sglang.srt.arg_groups import model_override_base
from support.servers import run_to_end

from sglang_dflash.srt.environ import DFlashOptions
from sglang_dflash.srt.hardware_backend.cpu import runtime
from sglang_dflash.srt.plugins import compatibility, entry_points, hooks, install, ledger
from sglang_dflash.srt.plugins.change import CPU, Change
from sglang_dflash.srt.speculative.implementation import Implementation

CHANGES = tuple(change for table in ledger.TABLES.values() for change in table)
# SGLang has no P-EAGLE model and no MLA on torch_native, and 0.5.22 has DFlash2 under one name. Any other new
# key needs a reason of its own.
NEW_KEYS = {
    ("models", "PEagleDraftModel"),
    ("models", "DFlash2BeamDraftModel"),
    ("models", "MiniMaxDFlash2DraftModel"),
    ("_handlers", "torch_native"),
}


def name_of(change: Change) -> str:
    return change.name + (f"[{change.key}]" if change.key else "")


@pytest.mark.parametrize("change", [*CHANGES, *ledger.AT_HAND_OVER], ids=name_of)
def test_an_entry(change):
    """Check the entry's target, its reason and the signature of its hook."""
    install.check(change)
    _, target = install.resolve(change.target)
    assert len(change.why.split()) >= 4
    assert len(change.remove_when.split()) >= 4
    assert change.upstream == "none" or change.upstream.startswith("https://github.com/sgl-project/sglang/")
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
        # A hook that passes on whatever its target takes has the parameters of this SGLang.
        assert parameters[: len(extra)] == extra and change.accepts(parameters[len(extra) :])


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
def test_a_missing_target_is_named(target):
    with pytest.raises(install.Mismatch, match="no .* to change") as caught:
        install.check(dataclasses.replace(EXAMPLE, target=target))
    assert target in str(caught.value) and EXAMPLE.why in str(caught.value)


@pytest.mark.parametrize("signature", ["(self)", "(self, server_args, more)", "(self, args)", "()"])
def test_another_signature_is_named(signature):
    with pytest.raises(install.Mismatch) as caught:
        install.check(dataclasses.replace(EXAMPLE, signature=signature))
    assert signature in str(caught.value) and EXAMPLE.signature in str(caught.value)


def test_something_else_than_a_registry_is_named():
    entry = next(change for change in CHANGES if change.kind == "entry")
    with pytest.raises(install.Mismatch, match="not a registry"):
        install.check(dataclasses.replace(entry, target=EXAMPLE.target))


def test_an_import_error_inside_sglang_is_not_taken_for_a_missing_target(tmp_path, monkeypatch):
    """A module that exists but cannot be imported must name the missing import."""
    (tmp_path / "broken_host.py").write_text("import module_that_is_not_installed\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(install.Mismatch, match="module_that_is_not_installed"):
        install.check(dataclasses.replace(EXAMPLE, target="broken_host.function"))


def test_nothing_is_applied_when_one_check_fails(monkeypatch):
    """All targets are checked before the first replacement is built."""
    built = []
    changes = [
        dataclasses.replace(change, build=lambda: built.append(1))
        for change in ledger.AT_LOAD
        if not change.cpu_only
    ]
    broken = dataclasses.replace(EXAMPLE, signature="(nothing)")
    monkeypatch.setattr(ledger, "AT_LOAD", (*changes, broken))
    with pytest.raises(install.Mismatch):
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


def entry_of_registry(key: str, cpu_only: bool = False) -> Change:
    entry = next(change for change in CHANGES if change.kind == "entry")
    return dataclasses.replace(
        entry, target="fake.registry", key=key, cpu_only=cpu_only, build=lambda: "ours"
    )


def test_worker_changes_are_checked_before_the_first_is_applied(registry):
    broken = dataclasses.replace(EXAMPLE, kind="replace", signature="(nothing)")
    with pytest.raises(install.Mismatch):
        install.install((entry_of_registry("key"), broken))
    assert registry["key"] == "stock"
    install.install((entry_of_registry("key"),))
    assert registry["key"] == "ours"


@pytest.mark.parametrize("active", [True, False])
def test_cpu_changes_are_made_on_the_cpu_only(active, registry, monkeypatch):
    monkeypatch.setattr(runtime, "is_active", lambda: active)
    install.install((entry_of_registry("cpu key", cpu_only=True), entry_of_registry("key")))
    assert registry == {"key": "ours", "cpu key": "ours" if active else "stock"}


@pytest.mark.parametrize("version, value", [("0.5.22", "ours"), ("0.5.23", "stock"), ("0.6.0", "stock")])
def test_a_change_for_older_releases_is_made_there_only(version, value, registry, monkeypatch):
    monkeypatch.setattr(install, "installed_version", lambda: version)
    install.install((dataclasses.replace(entry_of_registry("key"), until="0.5.23"),))
    assert registry["key"] == value


def test_a_failed_build_changes_nothing(registry):
    def fail():
        raise ImportError("a module of ours")

    broken = dataclasses.replace(entry_of_registry("cpu key"), build=fail)
    with pytest.raises(ImportError):
        install.install((entry_of_registry("key"), broken))
    assert registry["key"] == "stock"


def test_a_feature_without_its_target_is_off_and_named(registry, caplog):
    """None of the feature's changes is made; those of others are."""
    fits = dataclasses.replace(entry_of_registry("cpu key"), feature="some feature")
    lacks = dataclasses.replace(EXAMPLE, feature="some feature", signature="(nothing)")
    install.install((fits, lacks, entry_of_registry("key")))
    assert registry == {"key": "ours", "cpu key": "stock"}
    [line] = [record.getMessage() for record in caplog.records]
    assert "without some feature" in line and EXAMPLE.target in line and "(nothing)" in line


@pytest.fixture
def as_another_sglang(monkeypatch):
    """Return a function that makes the installed SGLang another version, which lacks these targets."""

    def pretend(version: str, *lacking: Change) -> None:
        def check(change: Change) -> None:
            if change in lacking:
                raise install.Mismatch(f"SGLang has no {change.target} to change")

        monkeypatch.setattr(install, "check", check)
        monkeypatch.setattr(compatibility, "installed_version", lambda: version)
        compatibility.why_off.cache_clear()

    yield pretend
    compatibility.why_off.cache_clear()


OPTIONAL = next(change for change in ledger.AT_WORKER if change.feature)


def test_a_later_sglang_is_served_with_one_warning(as_another_sglang, caplog):
    as_another_sglang("0.5.99", OPTIONAL)
    record = SimpleNamespace()
    assert not any(compatibility.leave_to_sglang(record) for _ in range(2))
    [line] = [entry.getMessage() for entry in caplog.records]
    assert "0.5.99" in line and f"Off on this SGLang: {OPTIONAL.feature}." in line
    assert not Implementation.of(record).is_builtin


REQUIRED = next(change for change in ledger.AT_WORKER if change.feature is None)


@pytest.mark.parametrize("change", [EXAMPLE, REQUIRED], ids=name_of)
def test_without_a_required_target_the_built_in_serves(change, as_another_sglang, caplog):
    """Check that SGLang's own functions are called, in the launcher and in a scheduler."""
    as_another_sglang("0.5.99", change)
    record = SimpleNamespace(speculative_algorithm="DFLASH")
    algorithm = SimpleNamespace(is_dflash=lambda: True)
    assert compatibility.leave_to_sglang(record)
    assert hooks.handle_server_args()(lambda *_: "stock arguments", algorithm, record) == "stock arguments"
    scheduler = pickle.loads(pickle.dumps(record))
    assert hooks.create_worker()(lambda *_: "stock worker", algorithm, scheduler) == "stock worker"
    [line] = [entry.getMessage() for entry in caplog.records]
    assert "built-in" in line and change.target in line


@pytest.mark.skipif(not runtime.is_active(), reason="a GPU needs nothing of it")
def test_without_what_a_cpu_needs_the_built_in_serves(as_another_sglang):
    as_another_sglang("0.5.99", next(change for change in ledger.AT_LOAD if change.feature == CPU))
    assert compatibility.leave_to_sglang(SimpleNamespace(speculative_algorithm="DFLASH"))


@pytest.mark.parametrize(
    "option, words", [(DFlashOptions.STRICT, "strict forbids"), (DFlashOptions.COPY_AHEAD, "copy-ahead")]
)
def test_what_only_ours_has_is_refused_there(option, words, as_another_sglang, monkeypatch):
    as_another_sglang("0.5.99", EXAMPLE)
    monkeypatch.setenv(option.variable, "1")
    with pytest.raises(ValueError, match=f"does not fit .*{words}"):
        compatibility.leave_to_sglang(SimpleNamespace())


def test_what_another_plugin_replaced_is_found_in_the_launcher(monkeypatch, caplog):
    """The files are those of a supported release, but a plugin has replaced a function."""
    from sglang.srt.speculative import dflash_utils

    compatibility.why_off.cache_clear()
    monkeypatch.setattr(dflash_utils, "resolve_dflash_verify_mask_policy", lambda backend, mode: None)
    record = SimpleNamespace(speculative_algorithm="DFLASH")
    algorithm = SimpleNamespace(is_dflash=lambda: True)
    try:
        assert compatibility.leave_to_sglang(record)
        assert (
            hooks.handle_server_args()(lambda *_: "stock arguments", algorithm, record) == "stock arguments"
        )
    finally:
        compatibility.why_off.cache_clear()
    [line] = [entry.getMessage() for entry in caplog.records]
    assert "resolve_dflash_verify_mask_policy takes (backend, mode), expected (attn_backend)" in line


def test_a_target_that_is_not_loaded_is_not_imported_on_an_unchanged_release(monkeypatch):
    change = next(change for change in ledger.AT_WORKER if change.name == "DFlashVerifyInput")
    elsewhere = dataclasses.replace(change, target="sglang.srt.no_such_module.DFlashVerifyInput")
    assert install.find_mismatch([elsewhere], is_loaded_only=True) is None
    assert "no_such_module" in install.find_mismatch([elsewhere])


def test_a_worker_that_cannot_be_imported_is_found_in_the_launcher(as_another_sglang, monkeypatch, caplog):
    """A name that our files import may be there in the file, and fail to be imported."""
    as_another_sglang("0.5.99")
    monkeypatch.setitem(sys.modules, "sglang_dflash.srt.speculative.dflash_worker", None)
    assert compatibility.leave_to_sglang(SimpleNamespace(speculative_algorithm="DFLASH"))
    [line] = [entry.getMessage() for entry in caplog.records]
    assert "built-in" in line and "dflash_worker" in line


def test_an_unchanged_release_says_nothing(caplog):
    compatibility.why_off.cache_clear()
    assert compatibility.why_off() is None and not caplog.records


def test_the_record_of_arguments_carries_the_decision(as_another_sglang):
    """SGLang's record refuses new fields; ours must pass, and reach the children."""
    from sglang.srt.server_args import ServerArgs

    as_another_sglang("0.5.99", EXAMPLE)
    args = ServerArgs(model_path="none")
    assert compatibility.leave_to_sglang(args)
    assert Implementation.of(pickle.loads(pickle.dumps(args))).is_builtin


IMPORTED_BEFORE = """
import sys
import sglang.srt.managers.scheduler
from sglang.srt.layers.attention import hybrid_linear_attn_backend
from sglang_dflash.srt.environ import DFlashOptions
from sglang_dflash.srt.plugins import install, ledger
from sglang.srt.plugins import load_plugins
changes = [change for change in ledger.AT_LOAD if change.kind == "replace"]
assert all(change.cpu_only for change in changes)
changes = install.relevant(changes)
targets = {change.target: install.resolve(change.target)[1] for change in changes}
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


# Whether our flags are there shows whether anything but the CPU runtime has been installed.
ANOTHER_SIGNATURE = """
import argparse
import sglang
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
SpeculativeAlgorithm.create_worker = lambda self, a, b: 0
load_plugins()
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
print("flags of ours:", "--speculative-copy-ahead" in parser.format_help())
"""


def test_a_mismatch_leaves_the_server_to_sglang():
    """SGLang goes on without any of our changes, and one line says why."""
    done = run_to_end("-c", ANOTHER_SIGNATURE, is_cold=True)
    assert done.code == 0 and "flags of ours: False" in done.output, done.output
    [line] = [line for line in done.output.splitlines() if "is off" in line]
    assert "create_worker takes (self, a, b), expected (self, server_args)" in line


def test_any_other_failure_leaves_the_server_to_sglang(monkeypatch, caplog):
    def fail():
        raise ValueError("half a hook")

    monkeypatch.setattr(install, "install_at_load", fail)
    monkeypatch.setattr(compatibility, "_tell_if_dflash_is_requested", lambda: None)
    entry_points.install()
    [line] = [entry.getMessage() for entry in caplog.records]
    assert "is off" in line and "ValueError: half a hook" in line


def test_a_server_that_asked_for_dflash_hears_more(monkeypatch, caplog):
    from sglang.srt.arg_groups import resolution_hooks

    monkeypatch.setattr(resolution_hooks, "_HOOKS", {})
    monkeypatch.setattr(model_override_base, "resolving_view", lambda record: record)
    compatibility.switch_off(install.Mismatch("something is gone"))

    def handle_speculative_decoding(record):
        record.is_resolved = True

    for algorithm, lines in ((None, 1), ("EAGLE", 1), ("DFLASH", 2)):
        record = SimpleNamespace(speculative_algorithm=algorithm)
        resolution_hooks.run_hook(handle_speculative_decoding, record)
        assert record.is_resolved and len(caplog.records) == lines
    assert "built-in" in caplog.records[-1].getMessage()
