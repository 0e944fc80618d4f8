"""Bad starts: each ends with a non-zero exit code and names the mistake.

SGLang refuses them while it reads its arguments. The tests run the real entry point, each in a fork of a
process that has imported SGLang; with -m long two also run as a user's command.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from serving import PEAGLE_DRAFT, TARGET, dflash_arguments
from support.drafts import make_draft, read_config
from support.faults import FAULTS, write_fault
from support.servers import Ended, patched, run_to_end
from transformers import Lfm2Config

from sglang_dflash.srt.environ import DFlashOptions
from sglang_dflash.srt.hardware_backend.cpu import runtime

pytestmark = pytest.mark.server

MODEL = ["--model-path", str(TARGET)]
LAYERS = read_config(TARGET)["num_hidden_layers"]
DRAFT_FLAG = "--speculative-draft-model-path"
PEAGLE = [*MODEL, "--speculative-algorithm", "PEAGLE"]

Start = tuple[list[str], tuple[str, ...]]  # arguments, and patterns in the message


def with_fault(name: str) -> Callable[[Path], Start]:
    return lambda tmp: (
        [*MODEL, *dflash_arguments(write_fault(name, tmp / "draft"))],
        (FAULTS[name][1],),
    )


def with_flags(*flags: str, says: tuple[str, ...]) -> Callable[[Path], Start]:
    return lambda _: ([*MODEL, *dflash_arguments(), *flags], says)


def without_draft(path: str) -> Callable[[Path], Start]:
    return lambda _: ([*MODEL, *dflash_arguments(path)], (DRAFT_FLAG, path))


def with_broken_config(tmp: Path) -> Start:
    draft = make_draft(tmp / "draft")
    (draft / "config.json").write_text("{not json")
    return [*MODEL, *dflash_arguments(draft)], (str(draft),)


def with_last_layer(tmp: Path) -> Start:
    draft = make_draft(tmp / "draft", base=PEAGLE_DRAFT, eagle_aux_hidden_state_layer_ids=[2, 6, LAYERS])
    return [*PEAGLE, DRAFT_FLAG, str(draft)], ("the last layer", str(draft))


# unit/configs/test_corrupted_checkpoints.py has messages of other drafts, unit/arg_groups/ of other flags.
STARTS: dict[str, Callable[[Path], Start]] = {
    "two faults": with_fault("two faults"),
    "no draft window": with_flags(
        "--speculative-draft-window-size", "0", says=("--speculative-draft-window-size", "0")
    ),
    "adaptive widths without adaptive": with_flags(
        *("--no-speculative-adaptive", "--speculative-adaptive-config", "widths.json"),
        says=("--speculative-adaptive-config", "--no-speculative-adaptive"),
    ),
    "adaptive without its config file": with_flags(
        *("--speculative-adaptive", "--speculative-adaptive-config", "/no/widths.json"),
        says=("--speculative-adaptive-config", "/no/widths.json", "cannot be read"),
    ),
    "a record in a file": with_flags(
        "--speculative-record", __file__, says=("--speculative-record", __file__)
    ),
    "a record without a draft": lambda _: (
        [*MODEL, "--speculative-record", "records"],
        ("--speculative-record needs --speculative-algorithm DFLASH",),
    ),
    "no draft given": lambda _: ([*MODEL, "--speculative-algorithm", "DFLASH"], (DRAFT_FLAG,)),
    "draft path missing": without_draft("/no/draft/here"),
    # As in the README's command: it looks like a name on the Hugging Face hub.
    "relative draft path missing": without_draft("models/no-such-draft"),
    "draft config is no JSON": with_broken_config,
    "the target as its own draft": lambda _: (
        [*MODEL, *dflash_arguments(TARGET)],
        ("DFlash", "Qwen3ForCausalLM"),
    ),
    "P-EAGLE that reads the last layer": with_last_layer,
}


def refusal(arguments: list[str], is_cold: bool = False, environment: dict[str, str] | None = None) -> str:
    """Start a server that ends; return its last error, without the flags that SGLang echoes."""
    command = "-m", "sglang.launch_server", *arguments
    ended: Ended = run_to_end(*command, environment=environment, is_cold=is_cold, timeout=120)
    assert ended.code not in (0, -9), f"the server started, or hung:\n{ended.output[-3000:]}"
    assert "Traceback" not in ended.output
    return ended.output[ended.output.rfind("Error") :]


@pytest.mark.parametrize("name", STARTS)
def test_a_bad_start_ends_with_a_message(name, tmp_path):
    arguments, patterns = STARTS[name](tmp_path)
    message = refusal(arguments)
    missing = [pattern for pattern in patterns if not re.search(pattern, message, re.DOTALL)]
    assert not missing, f"{missing} not in the message:\n{message}"


def test_two_simulations_of_acceptance_end_the_start():
    both = {"SGLANG_SIMULATE_ACC_LEN": "3.5", DFlashOptions.SIMULATE_ACC_LENS.variable: "4,2"}
    message = refusal([*MODEL, *dflash_arguments()], environment=both)
    assert all(f"{name} " in message for name in both)


@pytest.mark.parametrize(
    "fault, words",
    [
        (
            "another_sglang",
            "does not fit SGLang 0.5.99. sglang.srt.server_args.ServerArgs.add_cli_args takes",
        ),
        ("failing_activation", "KeyError: 'a registry that another plugin has closed'"),
    ],
)
def test_dflash_does_not_start_without_an_activated_plugin(fault, words):
    """SGLang's loader would go on without us. test_fallback_processes.py starts a server without DFLASH."""
    command = "-m", "sglang.launch_server", *MODEL, *dflash_arguments()
    ended = run_to_end(*command, environment=patched(fault), timeout=120)
    assert ended.code not in (0, -9), f"the server started, or hung:\n{ended.output[-3000:]}"
    warning, error = [line for line in ended.output.splitlines() if "is off, because" in line]
    assert "Servers without DFLASH start as ever." in warning
    assert error.startswith("Error: sglang-dflash ") and words in error
    assert "Traceback" not in ended.output


@pytest.mark.skipif(not runtime.needs_stand_in(), reason="CUDA serves them")
@pytest.mark.parametrize("draft", [(), dflash_arguments()], ids=["no draft", "dflash"])
@pytest.mark.parametrize(
    ("target", "flags", "word"),
    [
        (TARGET, ("--disaggregation-mode", "decode"), "--disaggregation-mode"),
        (TARGET, ("--enable-hierarchical-cache",), "--enable-hierarchical-cache"),
        (TARGET, ("--enable-return-routed-experts",), "--enable-return-routed-experts"),
        (Lfm2Config(architectures=["Lfm2ForCausalLM"], num_hidden_layers=4), (), "Lfm2ForCausalLM"),
    ],
    ids=["disaggregation", "hierarchical cache", "experts", "LFM2"],
)
def test_what_needs_a_gpu_is_refused_on_a_cpu(target, flags, word, draft, tmp_path):
    if target != TARGET:
        target.save_pretrained(tmp_path)
        target = tmp_path
    message = refusal(["--model-path", str(target), *draft, *flags])
    assert "Error: Not served on a CPU: " in message and word in message


@pytest.mark.long
@pytest.mark.parametrize("name", ["two faults", "relative draft path missing"])
def test_a_command_line_ends_as_its_fork_does(name, tmp_path):
    """Compare a fork, as used above, with the command that a user types."""
    arguments, [pattern, *_] = STARTS[name](tmp_path)
    cold, warm = (refusal(arguments, is_cold) for is_cold in (True, False))
    assert cold == warm and re.search(pattern, cold, re.DOTALL)
