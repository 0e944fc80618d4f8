"""Our own flags: on the command line, in a --config file, and as environment variables."""

import argparse
import os
from types import SimpleNamespace

import pytest

from sglang_dflash.srt.arg_groups import options
from sglang_dflash.srt.arg_groups.options import (
    add_flags,
    check_record_options,
    check_simulated_lens,
    resolve_adaptive,
)
from sglang_dflash.srt.arg_groups.resolve import check_copy_ahead, prepare
from sglang_dflash.srt.environ import DFlashOptions, Option
from sglang_dflash.srt.observability.record import FILE_BYTES


@pytest.fixture
def parser(monkeypatch) -> argparse.ArgumentParser:
    for option in vars(DFlashOptions).values():
        if isinstance(option, Option):
            monkeypatch.setenv(option.variable, "")  # restored afterwards, whatever a test sets
    parser = argparse.ArgumentParser()
    parser.add_argument("--speculative-use-rejection-sampling", action="store_true")
    parser.add_argument("--speculative-adaptive", action="store_true")
    add_flags(parser)
    return parser


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ([], False),
        (["--speculative-draft-sample-method", "greedy"], False),
        (["--speculative-draft-sample-method", "probabilistic"], True),
        (["--speculative-use-rejection-sampling"], True),
    ],
)
def test_the_sample_method_is_sglangs_own_field(parser, arguments, expected):
    assert parser.parse_args(arguments).speculative_use_rejection_sampling is expected


@pytest.mark.parametrize("method", ["gumbel", "Greedy", ""])
def test_other_methods_are_refused_by_name(parser, method, capsys):
    with pytest.raises(SystemExit):
        parser.parse_args(["--speculative-draft-sample-method", method])
    complaint = capsys.readouterr().err
    assert "greedy" in complaint and "probabilistic" in complaint


@pytest.mark.parametrize(
    "flag, option",
    [
        ("--speculative-copy-ahead", DFlashOptions.COPY_AHEAD),
        ("--speculative-dflash-strict", DFlashOptions.STRICT),
        ("--speculative-record-opt-in", DFlashOptions.RECORD_OPT_IN),
    ],
)
def test_switches_are_off_unless_asked_for(parser, monkeypatch, flag, option):
    parser.parse_args([])
    assert not option.get()
    parser.parse_args([flag])
    assert option.get()
    monkeypatch.setenv(option.variable, "yes")
    with pytest.raises(ValueError, match="must be 1 or 0, got 'yes'"):
        option.get()


def test_an_empty_value_is_refused(parser, capsys):
    """As of `--speculative-record "$DIR"` where DIR is not set: nothing would be recorded."""
    with pytest.raises(SystemExit):
        parser.parse_args(["--speculative-record", ""])
    assert "--speculative-record needs a value" in capsys.readouterr().err


def test_copies_that_could_not_be_are_refused(parser, monkeypatch):
    check_copy_ahead(block_size=1)  # nobody asked
    parser.parse_args(["--speculative-copy-ahead"])
    check_copy_ahead(block_size=2)
    with pytest.raises(ValueError, match="no place to copy to"):
        check_copy_ahead(block_size=1)
    for variable in ("SGLANG_SIMULATE_ACC_LEN", DFlashOptions.SIMULATE_ACC_LENS.variable):
        with monkeypatch.context() as context:
            context.setenv(variable, "3.5")
            with pytest.raises(ValueError, match="made-up tokens"):
                check_copy_ahead(block_size=8)


@pytest.mark.parametrize(
    "means, environment, words",
    [
        ("8.2,4.2", {"SGLANG_SIMULATE_ACC_LEN": "4"}, "exclude each other"),
        ("8.2,4.2", {"SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token"}, "fixed token"),
        ("8.2,0.9", {}, "from 1, .* to 16, .* got 8.2,0.9"),
        ("16.1", {}, "to 16, the whole block, got 16.1"),
        ("nan", {}, "got nan"),
        ("8.2;4.2", {}, "float values separated by commas, got '8.2;4.2'"),
        ("8.2,", {}, "float values separated by commas"),
    ],
)
def test_lengths_that_cannot_be_simulated_are_refused(monkeypatch, means, environment, words):
    variable = DFlashOptions.SIMULATE_ACC_LENS.variable
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    check_simulated_lens(block_size=16)  # nobody asked
    monkeypatch.setenv(variable, means)
    with pytest.raises(ValueError, match=f"{variable} .*{words}"):
        check_simulated_lens(block_size=16)
    for name in environment:
        monkeypatch.delenv(name)
    monkeypatch.setenv(variable, "16,1,4.2")
    check_simulated_lens(block_size=16)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--speculative-record-share", "1.5"], "--speculative-record-share must be from 0 to 1, got 1.5"),
        (["--speculative-record-share", "-0.1"], "from 0 to 1, got -0.1"),
        (["--speculative-record-share", "nan"], "from 0 to 1, got nan"),
        (["--speculative-record-share", "half"], "must be a number, got 'half'"),
        (["--speculative-record-limit", "7MB"], "--speculative-record-limit must be .* got 7000000"),
        (["--speculative-record-limit", "2 gigs"], "a size such as 500MB, got '2 gigs'"),
        (["--speculative-record-limit", "9" * 400], "a size such as 500MB, got '9*'"),
        (["--speculative-record-limit", "inf"], "a size such as 500MB, got 'inf'"),
    ],
)
def test_a_record_that_cannot_be_is_refused(parser, tmp_path, arguments, words):
    check_record_options(1)  # nobody asked
    folder = tmp_path / "deep" / "record"
    parser.parse_args(["--speculative-record", str(folder), "--speculative-record-limit", "0.5GB"])
    check_record_options(1)
    assert list(folder.iterdir()) == [] and folder.stat().st_mode & 0o777 == 0o700
    assert DFlashOptions.RECORD_LIMIT.get() == 5 * 10**8
    parser.parse_args(arguments)
    with pytest.raises(ValueError, match=words):
        check_record_options(1)


def test_a_record_has_a_file_for_each_rank(parser, tmp_path):
    parser.parse_args(["--speculative-record", str(tmp_path), "--speculative-record-limit", "26MB"])
    check_record_options(2)
    with pytest.raises(ValueError, match=f"must be {5 * FILE_BYTES} bytes or more, got 26000000"):
        check_record_options(3)


@pytest.mark.parametrize(
    "option", [option for option in vars(DFlashOptions).values() if isinstance(option, Option)]
)
def test_a_value_that_cannot_be_read_ends_the_start(option, monkeypatch):
    if option.parse in (str, os.path.expanduser) or option is DFlashOptions.OBSERVERS:
        return  # any text
    monkeypatch.setenv(option.variable, "yes")
    with pytest.raises(ValueError, match=f"^{option.variable} must be .*, got 'yes'"):
        prepare(None)


def test_a_record_without_a_place_is_refused(parser, tmp_path):
    (tmp_path / "file").touch()
    parser.parse_args(["--speculative-record", str(tmp_path / "file")])
    with pytest.raises(ValueError, match=f"--speculative-record {tmp_path}/file: cannot be written"):
        check_record_options(1)


def test_adaptive_width_learns_from_lengths_by_request(parser, monkeypatch):
    monkeypatch.setenv(DFlashOptions.SIMULATE_ACC_LENS.variable, "4,2")
    assert is_adaptive() and is_adaptive(is_requested=True)


def test_a_config_file_turns_copies_on(parser, monkeypatch, tmp_path):
    from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

    path = tmp_path / "server.yaml"
    path.write_text("speculative-copy-ahead: true\n")
    parser.add_argument("--config")
    parser.parse_args(ConfigArgumentMerger(parser).merge_config_with_args(["--config", str(path)]))
    assert DFlashOptions.COPY_AHEAD.get()


ON_A_CPU = SimpleNamespace(
    device="cpu",
    disaggregation_mode="null",
    attn_dp_size=1,
    enable_lora=None,
    lora_paths=None,
    enable_linear_replayssm_spec=False,
    speculative_adaptive_config=None,
)


def is_adaptive(args=ON_A_CPU, is_requested=False, block_size=8, is_recurrent=False) -> bool:
    """Resolve adaptive width. Return whether the server will run with it."""
    resolve_adaptive(args, is_requested, block_size, is_recurrent)
    return DFlashOptions.ADAPTIVE.get() != ()


@pytest.mark.parametrize(
    "said, is_wanted, is_never",
    [
        ([], False, False),
        (["--speculative-adaptive"], True, False),
        (["--no-speculative-adaptive"], False, True),
        (["--speculative-adaptive", "--no-speculative-adaptive"], False, True),
        (["--no-speculative-adaptive", "--speculative-adaptive"], True, True),  # what is wanted counts
    ],
)
def test_adaptive_width_is_the_default_unless_ruled_out(parser, said, is_wanted, is_never):
    assert parser.parse_args(said).speculative_adaptive is is_wanted
    assert is_adaptive(is_requested=is_wanted) is (is_wanted or not is_never)


def test_one_default_turns_it_on_on_a_gpu(parser, monkeypatch):
    on_a_gpu = SimpleNamespace(**vars(ON_A_CPU) | {"device": "cuda"})
    assert not is_adaptive(on_a_gpu) and is_adaptive(on_a_gpu, is_requested=True)
    monkeypatch.setattr(options, "ON_BY_DEFAULT", ("cpu", "cuda"))
    assert is_adaptive(on_a_gpu)


def test_basic_mode_verifies_whole_blocks_on_a_cpu_too(parser, monkeypatch):
    monkeypatch.setenv(DFlashOptions.BASIC_MODE.variable, "1")
    assert not is_adaptive() and not is_adaptive(is_requested=True)


@pytest.mark.parametrize(
    "arguments, block_size, is_recurrent, reason",
    [
        ({"device": "cuda"}, 8, False, "until it has been measured on one"),
        ({}, 1, False, "block of 1"),
        ({"enable_linear_replayssm_spec": True}, 8, True, "ReplaySSM"),
        ({"disaggregation_mode": "prefill"}, 8, False, "only prefills"),
    ],
)
def test_where_it_is_not_the_default_the_log_says_why(
    parser, caplog, arguments, block_size, is_recurrent, reason
):
    caplog.set_level("INFO")
    args = SimpleNamespace(**vars(ON_A_CPU) | arguments)
    assert not is_adaptive(args, block_size=block_size, is_recurrent=is_recurrent)
    assert reason in caplog.text


@pytest.mark.parametrize(
    "arguments, is_recurrent, simulated, reason",
    [
        ({"attn_dp_size": 2}, False, "", "with DP attention"),
        ({"enable_linear_replayssm_spec": True}, True, "", "ReplaySSM"),
        ({"device": "cuda", "enable_lora": True}, False, "", "with LoRA"),
        ({"device": "cuda", "lora_paths": ["a=b"]}, False, "", "with LoRA"),
        ({}, False, "3.5", "equally much of all requests"),
    ],
)
def test_if_it_is_impossible_a_warning_says_so(
    parser, monkeypatch, caplog, arguments, is_recurrent, simulated, reason
):
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", simulated)
    args = SimpleNamespace(**vars(ON_A_CPU) | arguments)
    assert not is_adaptive(args, is_recurrent=is_recurrent)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    assert not is_adaptive(args, is_requested=True, is_recurrent=is_recurrent)
    [warning] = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "--speculative-adaptive is not supported" in warning.getMessage()
    assert reason in warning.getMessage()


def test_sglang_knows_them():
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    given = ["--model-path", "x", "--speculative-draft-sample-method", "probabilistic"]
    assert parser.parse_args(given).speculative_use_rejection_sampling is True
