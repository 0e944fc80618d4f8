"""Flags of our own on SGLang's command line, and in its `--config` files.

What SGLang has a field for is written there; the rest goes into environment variables, which every child
process inherits and which are how `sgl.Engine(...)` sets them."""

import argparse
import os

from sglang_dflash.srt.speculative.drafters.copy_switch import VARIABLE as COPY_AHEAD_VARIABLE
from sglang_dflash.srt.speculative.drafters.sampling import SAMPLED_SLOTS_VARIABLE, TEMPERATURE_SCALE_VARIABLE
from sglang_dflash.srt.speculative.width.settings import NEVER_VARIABLE

SAMPLE_METHODS = ("greedy", "probabilistic")


class _SetSampleMethod(argparse.Action):
    """Probabilistic drafting is what SGLang's --speculative-use-rejection-sampling asks for."""

    def __call__(self, parser, namespace, value, option_string=None):
        namespace.speculative_use_rejection_sampling = value == "probabilistic"


class _SetVariable(argparse.Action):
    """Keep a value in the environment variable the argument is named after."""

    def __call__(self, parser, namespace, value, option_string=None):
        os.environ[self.dest] = str(value)


class _TurnOn(argparse._StoreTrueAction):  # what SGLang's config files know of flags without a value
    """1 in the environment variable the argument is named after."""

    def __call__(self, parser, namespace, values, option_string=None):
        os.environ[self.dest] = "1"


class _TurnOffAdaptive(_TurnOn):
    """The opposite of SGLang's --speculative-adaptive; of the two, the one that comes last counts."""

    def __call__(self, parser, namespace, values, option_string=None):
        super().__call__(parser, namespace, values, option_string)
        namespace.speculative_adaptive = False


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sglang-dflash")
    group.add_argument(
        "--speculative-draft-sample-method",
        action=_SetSampleMethod,
        choices=SAMPLE_METHODS,
        default=argparse.SUPPRESS,
        help="How drafted tokens of sampled requests are chosen: the draft's argmax (default), or a draw from its "
        "distribution, verified with its true probabilities. Requests at temperature 0 always draft the argmax.",
    )
    group.add_argument(
        "--speculative-draft-temperature-scale",
        action=_SetVariable,
        dest=TEMPERATURE_SCALE_VARIABLE,
        type=float,
        default=argparse.SUPPRESS,
        help="Probabilistic drafting: the draft's temperature as a multiple of the request's. Lossless at any value.",
    )
    group.add_argument(
        "--speculative-draft-sampled-slots",
        action=_SetVariable,
        dest=SAMPLED_SLOTS_VARIABLE,
        type=int,
        default=argparse.SUPPRESS,
        help="Probabilistic drafting: draw only this many tokens of a block and take the argmax behind them.",
    )
    group.add_argument(
        "--speculative-copy-ahead",
        action=_TurnOn,
        dest=COPY_AHEAD_VARIABLE,
        default=argparse.SUPPRESS,
        help="Where a request's last tokens have stood in its prompt or output before, propose what came next there in the "
        "place of the draft's block, and leave the draft out of cycles in which all requests do. Lossless.",
    )
    group.add_argument(
        "--no-speculative-adaptive",
        action=_TurnOffAdaptive,
        dest=NEVER_VARIABLE,
        default=argparse.SUPPRESS,
        help="Verify whole blocks always. On a CPU each cycle otherwise verifies as many drafted tokens as are worth it; on a GPU "
        "only with --speculative-adaptive.",
    )
