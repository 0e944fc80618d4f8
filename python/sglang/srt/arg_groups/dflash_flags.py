"""Flags of our own on SGLang's command line, and in its `--config` files.

If SGLang has a field for a flag, it is written there; otherwise the flag writes a `DFlashOptions` option.
"""

import argparse
from typing import Any

from sglang_dflash.srt.configs.quantization import PACKED
from sglang_dflash.srt.environ import DFlashOptions

SAMPLE_METHODS = ("greedy", "probabilistic")
DRAFT_DTYPES = ("auto", "fp8")


class _SetSampleMethod(argparse.Action):
    """Probabilistic drafting is SGLang's --speculative-use-rejection-sampling."""

    def __call__(self, parser, namespace, values, option_string=None):
        namespace.speculative_use_rejection_sampling = values == "probabilistic"
        DFlashOptions.DRAFT_SAMPLE_METHOD.set(values)


class _SetOption(argparse.Action):
    """Set the option that the argument's `dest` names."""

    def __call__(self, parser, namespace, values, option_string=None):
        getattr(DFlashOptions, self.dest).set(values)


class _TurnOn(
    argparse._StoreTrueAction
):  # the class by which SGLang's config files know a flag without value
    """Set an option to 1.

    `dest` stays the flag's own name, by which SGLang 0.5.22 finds the flag of a config file.
    """

    def __init__(self, *args, option: str, **kwargs):
        super().__init__(*args, **kwargs)
        self._option = option

    def __call__(self, parser, namespace, values, option_string=None):
        getattr(DFlashOptions, self._option).set(1)


class _TurnOffAdaptive(_TurnOn):
    """The opposite of SGLang's --speculative-adaptive; the last of the two flags counts."""

    def __call__(self, parser, namespace, values, option_string=None):
        super().__call__(parser, namespace, values, option_string)
        namespace.speculative_adaptive = False


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add our flags to SGLang's parser."""
    for action in parser._actions:
        if action.dest == "speculative_draft_model_quantization":
            action.choices = [*(action.choices or ()), PACKED]  # SGLang's list is the target's flag's too
    group = parser.add_argument_group("sglang-dflash")

    def add(flag: str, help: str, **options: Any) -> None:
        group.add_argument(flag, default=argparse.SUPPRESS, help=help, **options)

    add(
        "--speculative-draft-sample-method",
        "How drafted tokens of sampled requests are chosen: the draft's argmax (default), or a draw from its "
        "distribution, verified with its true probabilities. At temperature 0 it is always the argmax.",
        action=_SetSampleMethod,
        choices=SAMPLE_METHODS,
    )
    add(
        "--speculative-draft-temperature-scale",
        "Probabilistic drafting: the draft's temperature, as a multiple of the request's. Always lossless.",
        action=_SetOption,
        dest="DRAFT_TEMPERATURE_SCALE",
        type=float,
    )
    add(
        "--speculative-draft-sampled-slots",
        "Probabilistic drafting: draw only this many tokens of a block, and take the argmax after them.",
        action=_SetOption,
        dest="DRAFT_SAMPLED_SLOTS",
        type=int,
    )
    add(
        "--speculative-draft-head-dtype",
        "LM head used for drafting: as it is (default), or an FP8 copy of half the size (sm_89 and later). "
        "Lossless: verification uses the head as it is.",
        action=_SetOption,
        dest="DRAFT_HEAD_DTYPE",
        choices=DRAFT_DTYPES,
    )
    add(
        "--speculative-copy-ahead",
        "If a request's last tokens occur earlier in its prompt or output, propose what followed them there "
        "instead of the draft's block. Cycles in which all requests copy skip the draft. Lossless.",
        action=_TurnOn,
        option="COPY_AHEAD",
    )
    add(
        "--speculative-dflash-strict",
        "If this plugin does not serve a draft, flag or device that SGLang's built-in DFLASH serves, end the "
        "start. By default the built-in serves, and a warning says why.",
        action=_TurnOn,
        option="STRICT",
    )
    add(
        "--no-speculative-adaptive",
        "Always verify whole blocks. By default each cycle on a CPU verifies as many drafted tokens as pay "
        "off; on a GPU that needs --speculative-adaptive.",
        action=_TurnOffAdaptive,
        option="NO_ADAPTIVE",
    )
