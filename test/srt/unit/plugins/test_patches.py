"""Our patches of SGLang.

Each entry must fit the installed SGLang. A mismatch must leave the server to SGLang, whole.
"""

import contextlib
import dataclasses
import functools
import inspect
import json
import pickle
import sys
import types
from types import SimpleNamespace

import pytest
import sglang  # noqa: F401  loads our platform plugin before any of SGLang's modules
from serving import ROOT
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from support.records import record_of
from support.releases import NEEDED_HERE
from support.servers import run_to_end

from sglang_dflash.srt import environ, patching, reaches
from sglang_dflash.srt.arg_groups.implementation import Implementation
from sglang_dflash.srt.environ import DFlashOptions
from sglang_dflash.srt.patching import CPU_ATTENTION, LOAD, WORKER, Patch
from sglang_dflash.srt.plugins import algorithm, compatibility, entry_points, patches, refusals

PATCHES = tuple(patches.all_patches())


def name_of(entry: Patch) -> str:
    return entry.name


@pytest.mark.parametrize("entry", PATCHES, ids=name_of)
def test_an_entry(entry):
    patching.check(entry)
    _, target = patching.resolve(entry.target)
    assert len(entry.why.split()) >= 4
    link = entry.upstream.startswith("https://github.com/sgl-project/sglang/")
    assert link or (ROOT / entry.upstream).is_file()
    value = entry.ours if entry.is_class else entry.build()
    value = getattr(value, "__func__", value)  # of a static method
    if entry.signature is None:  # a method of PyTorch, whose signature Python cannot inspect
        assert callable(target) and callable(value)
        return
    parameters = list(inspect.signature(value).parameters)
    assert inspect.isclass(value) == inspect.isclass(target) == entry.is_class
    assert entry.accepts(parameters)


def test_kinds_and_times():
    """At load the plugin patches what a CPU lacks, and the flags; the rest waits for a DFLASH worker.

    A name that modules import is patched at load only for a CPU: on a GPU nothing looks for importers.
    """
    others = [entry for entry in patches.patches_at(LOAD) if not entry.is_for_cpu]
    assert [entry.name for entry in others] == ["add_cli_args"]
    assert not [entry for entry in others if inspect.ismodule(patching.resolve(entry.target)[0])]


def test_our_algorithm_is_found_by_the_served_name_and_answers_as_the_built_in():
    algorithm.register()
    served = pickle.loads(pickle.dumps(algorithm.ServedName("DFLASH")))
    assert served == "DFLASH" and json.dumps(served) == '"DFLASH"'
    ours, theirs = SpeculativeAlgorithm.from_string(served), SpeculativeAlgorithm.from_string("DFLASH")
    assert type(ours) is algorithm.DFlashAlgorithm is type(SpeculativeAlgorithm.from_string("PEAGLE"))
    assert theirs is SpeculativeAlgorithm.DFLASH and ours in (SpeculativeAlgorithm.EAGLE, theirs)
    asked = [name for name in vars(SpeculativeAlgorithm) if name.startswith(("is_", "supports_", "has_"))]
    assert {name: getattr(ours, name)() for name in asked} == {
        name: getattr(theirs, name)() for name in asked
    }
    own = {"create_worker", "create_future_map", "build_disagg_draft_input"}
    methods = {name for name in vars(SpeculativeAlgorithm) if not name.startswith("_")}
    methods = {name for name in methods if inspect.isfunction(vars(SpeculativeAlgorithm)[name])}
    builtin_only = {"get_platform_worker_cls"}  # its create_worker asks for it
    assert methods - builtin_only <= set(dir(ours)) and own <= methods


def test_sglang_asks_for_the_upper_case_of_the_name_before_it_refuses_replay():
    """GatedDeltaNet with ReplaySSM is served because our name answers `upper()` with another one."""
    source = inspect.getsource(KVCacheConfigurator._build_hybrid_req_pool)
    assert '(get_spec().speculative_algorithm or "").upper()' in source
    assert algorithm.ServedName("DFLASH").upper() not in ("DSPARK", "DFLASH")


def test_no_target_is_listed_twice():
    for modules in (patches.MODULES, patches.CPU_MODULES):
        for time, names in modules.items():
            targets = [entry.target for entry in patches._patches_of(names, time)]
            assert targets and len(targets) == len(set(targets)) or time == CPU_ATTENTION


def test_each_module_is_listed_at_the_times_of_its_patches():
    """Else a patch is declared, and never made."""
    for module, entries in patching._declared.items():
        short = module.removeprefix("sglang_dflash.srt.")
        listed = patches.CPU_MODULES if "hardware_backend" in module else patches.MODULES
        assert all(short in listed[time] for entry in entries for time in entry.at), module


def test_the_page_says_what_of_dflash_makes_each_patch_necessary():
    """`docs/dev/contracts.md`: a row each. SGLang's own faults have no patch but for two exceptions."""
    section = (ROOT / "docs/dev/contracts.md").read_text().partition("## Patches")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    reasons = {name.strip("`"): reason for name, reason in rows}
    others = [entry for entry in PATCHES if not entry.is_for_cpu]
    assert reasons.keys() == {entry.target.removeprefix("sglang.srt.") for entry in others}
    assert len(others) <= 20
    assert all(reason.startswith(("because of DFLASH: ", "exception: ")) for reason in reasons.values())
    assert sum(reason.startswith("exception: ") for reason in reasons.values()) <= 2


# A target of a required patch.
EXAMPLE = next(entry for entry in patches.patches_at(WORKER) if entry.name == "is_disable_overlap_for_batch")


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
    with pytest.raises(patching.Mismatch, match="no .* to change") as caught:
        patching.check(dataclasses.replace(EXAMPLE, target=target))
    assert target in str(caught.value) and EXAMPLE.why in str(caught.value)


@pytest.mark.parametrize("signature", ["(self)", "(self, server_args, more)", "(self, args)", "()"])
def test_another_signature_is_named(signature):
    with pytest.raises(patching.Mismatch) as caught:
        patching.check(dataclasses.replace(EXAMPLE, signature=signature))
    assert signature in str(caught.value) and EXAMPLE.signature in str(caught.value)


def test_a_module_that_cannot_be_imported_names_the_missing_import(tmp_path, monkeypatch):
    (tmp_path / "broken_host.py").write_text("import module_that_is_not_installed\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(patching.Mismatch, match="module_that_is_not_installed"):
        patching.check(dataclasses.replace(EXAMPLE, target="broken_host.function"))


@pytest.fixture
def holder(monkeypatch) -> SimpleNamespace:
    """Object whose attributes `patch_of` replaces."""
    holder = SimpleNamespace(one="stock", two="stock")
    resolve = patching.resolve

    def found(path: str):
        where, _, name = path.rpartition(".")
        return (holder, getattr(holder, name)) if where == "holder" else resolve(path)

    monkeypatch.setattr(patching, "resolve", found)
    return holder


def ours():
    """Take the place of a target, for a test."""


def patch_of(name: str) -> Patch:
    return Patch(target=f"holder.{name}", ours=ours, at=(WORKER,), upstream="none")


BROKEN = dataclasses.replace(EXAMPLE, signature="(nothing)")


def test_all_targets_are_checked_before_the_first_is_replaced(holder):
    with pytest.raises(patching.Mismatch):
        patching.install((patch_of("one"), BROKEN))
    assert holder.one == "stock"
    patching.install((patch_of("one"),))
    assert holder.one is ours


@pytest.mark.parametrize("is_on_cpu", [True, False])
def test_cpu_patches_are_made_on_the_cpu_only(is_on_cpu, monkeypatch):
    monkeypatch.setattr(environ, "serves_on_stand_in", lambda: is_on_cpu)
    for time in patches.CPU_MODULES:
        assert any(entry.is_for_cpu for entry in patches.patches_at(time)) == is_on_cpu


@pytest.mark.parametrize("version, value", [("0.5.22", ours), ("0.5.23", "stock"), ("0.6.0", "stock")])
def test_a_patch_for_older_releases_is_made_there_only(version, value, holder, monkeypatch):
    monkeypatch.setattr(patching, "installed_version", lambda: version)
    patching.install((dataclasses.replace(patch_of("one"), until="0.5.23"),))
    assert holder.one == value


def test_a_feature_without_its_target_is_off_and_named(holder, caplog):
    """None of the feature's patches is made; those of others are."""
    fits = dataclasses.replace(patch_of("two"), feature="some feature")
    lacks = dataclasses.replace(BROKEN, feature="some feature")
    patching.install((fits, lacks, patch_of("one")))
    assert (holder.one, holder.two) == (ours, "stock")
    [line] = [record.getMessage() for record in caplog.records]
    assert "without some feature" in line and EXAMPLE.target in line and "(nothing)" in line


@pytest.fixture
def as_another_sglang(monkeypatch):
    """Return a function that makes the installed SGLang another version, which lacks these targets."""

    def pretend(version: str, *lacking: Patch) -> None:
        def check(entry: Patch) -> None:
            if entry in lacking:
                raise patching.Mismatch(f"SGLang has no {entry.target} to change")

        monkeypatch.setattr(patching, "check", check)
        monkeypatch.setattr(reaches, "NEEDED", NEEDED_HERE)
        monkeypatch.setattr(compatibility, "installed_version", lambda: version)
        compatibility.why_off.cache_clear()

    yield pretend
    compatibility.why_off.cache_clear()


OPTIONAL = next(entry for entry in patches.patches_at(WORKER) if entry.feature)


def test_a_later_sglang_is_served_with_one_warning(as_another_sglang, caplog):
    as_another_sglang("0.5.99", OPTIONAL)
    record = SimpleNamespace()
    assert not any(compatibility.leave_to_sglang(record) for _ in range(2))
    [line] = [entry.getMessage() for entry in caplog.records]
    assert "0.5.99" in line and f"Off on this SGLang: {OPTIONAL.feature}." in line
    assert not Implementation.from_server_args(record).is_builtin


def test_without_a_required_target_the_built_in_serves(as_another_sglang, caplog):
    """SGLang's own step resolves the arguments, and its own algorithm is found by the name."""
    as_another_sglang("0.5.99", EXAMPLE)
    record, resolved = record_of(), []
    entry_points.resolve_speculative_decoding(record, resolved.append)
    assert resolved == [record] and type(record.speculative_algorithm) is str
    assert DFlashOptions.FALLBACK.get()
    [line] = [entry.getMessage() for entry in caplog.records]
    assert "built-in" in line and EXAMPLE.target in line


@pytest.mark.parametrize(
    "option, words", [(DFlashOptions.STRICT, "strict forbids"), (DFlashOptions.COPY_AHEAD, "copy-ahead")]
)
def test_what_only_ours_has_is_refused_there(option, words, as_another_sglang, monkeypatch):
    as_another_sglang("0.5.99", EXAMPLE)
    monkeypatch.setenv(option.variable, "1")
    with pytest.raises(ValueError, match=f"(?s)does not fit .*{words}"):
        compatibility.leave_to_sglang(record_of())


def test_what_another_plugin_replaced_is_found_in_the_launcher(monkeypatch, caplog):
    """The files are those of a supported release, but a plugin has replaced a function."""
    from sglang.srt.managers import scheduler

    compatibility.why_off.cache_clear()
    monkeypatch.setattr(scheduler, "validate_dflash_request", lambda request: None)
    try:
        assert compatibility.leave_to_sglang(record_of())
    finally:
        compatibility.why_off.cache_clear()
    [line] = [entry.getMessage() for entry in caplog.records]
    assert "validate_dflash_request takes (request), expected (req, enable_overlap)" in line


def test_a_worker_that_cannot_be_imported_is_found_in_the_launcher(as_another_sglang, monkeypatch, caplog):
    """A name that our files import may be there in the file, and fail to be imported."""
    as_another_sglang("0.5.99")
    monkeypatch.setitem(sys.modules, "sglang_dflash.srt.speculative.dflash_worker", None)
    assert compatibility.leave_to_sglang(record_of())
    [line] = [entry.getMessage() for entry in caplog.records]
    assert "built-in" in line and "dflash_worker" in line


def test_an_unchanged_release_says_nothing(caplog):
    compatibility.why_off.cache_clear()
    assert compatibility.why_off() is None and not caplog.records


IMPORTED_BEFORE = """
import sys
import sglang.srt.managers.scheduler
from sglang.srt.layers.attention import hybrid_linear_attn_backend
from sglang_dflash.srt.environ import DFlashOptions
from sglang_dflash.srt import patching
from sglang_dflash.srt.plugins.patches import patches_at
from sglang.srt.plugins import load_plugins
entries = patching.relevant([entry for entry in patches_at(patching.LOAD) if entry.is_for_cpu])
targets = {entry.target: patching.resolve(entry.target)[1] for entry in entries}
load_plugins()
for target, old in targets.items():
    assert patching.resolve(target)[1] is not old, target
    for path, module in sys.modules.items():
        for name, value in list(vars(module).items()) if path.startswith("sglang.") else ():
            assert value is not old, f"{path}.{name} is still SGLang's"
importers = hybrid_linear_attn_backend.__dict__.keys() & {target.rpartition(".")[2] for target in targets}
print("imported before:", *importers)
"""


def test_names_imported_before_the_plugin_are_replaced_too():
    done = run_to_end("-c", IMPORTED_BEFORE)
    assert done.code == 0 and "imported before: " in done.output, done.output
    if environ.serves_on_stand_in():
        assert "scatter_mamba_states_after_mtp_verify" in done.output, (
            "nothing was imported before the plugin, so the test proves nothing"
        )


@pytest.fixture
def steps(monkeypatch) -> dict:
    """SGLang's argument steps, without a wrapper; the plugin has not failed yet."""
    from sglang.srt.arg_groups import resolution_hooks

    steps: dict = {}
    monkeypatch.setattr(resolution_hooks, "_HOOKS", steps)
    monkeypatch.setattr(refusals, "_failures", [])
    return steps


def run_step(steps: dict, name: str, algorithm: str | None) -> None:
    """Run the outermost wrapper of a step; SGLang's own part ends the test."""
    steps[name][-1](SimpleNamespace(speculative_algorithm=algorithm), lambda args: None)


@pytest.mark.parametrize(
    "table, words",
    [((BROKEN,), f"{EXAMPLE.target} takes {EXAMPLE.signature}, expected (nothing)"), (None, "TypeError: ")],
)
def test_a_failed_activation_ends_dflash_alone(table, words, steps, monkeypatch, caplog):
    """None of our patches is made. One warning says why, and so do a refusal and a scheduler."""
    monkeypatch.setattr(patches, "patches_at", lambda time: table)
    entry_points.install()
    [record] = caplog.records
    assert record.levelname == "WARNING" and "is off" in record.getMessage() and words in record.getMessage()
    for name in refusals.STEPS:
        run_step(steps, name, None)
        run_step(steps, name, "EAGLE")
        for algorithm_name in ("DFLASH", "dflash", "PEAGLE"):
            with pytest.raises(ValueError, match="is off, because") as refused:
                run_step(steps, name, algorithm_name)
            assert words in str(refused.value)
    with pytest.raises(ValueError, match="is off, because"):
        algorithm.prepare_scheduler()


@pytest.mark.parametrize(
    "words, ends",
    [
        (["--speculative-algorithm", "DFLASH"], True),
        (["--speculative-algorithm=dflash"], True),
        (["--model-path", "models/DFLASH-target", "--speculative-algorithm", "EAGLE"], False),
    ],
)
def test_without_argument_steps_the_command_line_decides(words, ends, steps, monkeypatch):
    """SystemExit passes SGLang's loader, which catches every Exception."""
    monkeypatch.setitem(sys.modules, "sglang.srt.arg_groups.resolution_hooks", None)
    monkeypatch.setattr(patches, "patches_at", lambda time: None)
    monkeypatch.setattr(sys, "argv", ["launch_server", *words])
    with pytest.raises(SystemExit, match="is off, because") if ends else contextlib.nullcontext():
        entry_points.install()


def test_a_wrapper_of_another_plugin_stays(monkeypatch):
    """Our function runs around it, once although it is installed twice."""
    module = types.ModuleType("stand_in")
    calls = []

    def theirs():
        calls.append("SGLang's")

    @functools.wraps(theirs)
    def another_plugins():
        calls.append("another plugin's")
        theirs()

    module.function = another_plugins
    monkeypatch.setitem(sys.modules, "stand_in", module)
    entry = Patch(target="stand_in.function", ours=lambda original: original(), at=(), upstream="")
    for _ in range(2):
        patching.install((entry,))
    module.function()
    assert calls == ["another plugin's", "SGLang's"]
