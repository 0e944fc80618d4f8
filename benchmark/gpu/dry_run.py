"""Check of every server command, without a GPU and without starting a server."""

import argparse
import functools
from collections.abc import Sequence

from gpu.plans import Part
from gpu.servers import CPU_BACKEND, NO_SPECULATION, ServerSpec


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise ValueError(message)


def check(parts: Sequence[Part]) -> list[str]:
    """Print the parts and their commands. Returns one line per problem."""
    problems = []
    for part in parts:
        print(f"\n{part.name}")
        for spec in part.servers:
            found = problems_of(spec)
            print("  " + spec.command(), *(f"    PROBLEM: {problem}" for problem in found), sep="\n")
            problems += [f"{part.name}: {problem}" for problem in found]
    return problems


@functools.cache
def _known_variables() -> set[str]:
    """Return the names of variables that are not SGLang's own."""
    from sglang_dflash.srt.environ import DFlashOptions

    ours = {option.variable for name, option in vars(DFlashOptions).items() if name.isupper()}
    return {*ours, "PYTHONPATH", "PHASE_TIMES"}


def problems_of(spec: ServerSpec) -> list[str]:
    """List what SGLang refuses of this server: flags, environment, configs."""
    from sglang.srt.environ import envs
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()  # as a server does first; ours reads configs that SGLang's own parser rejects
    from sglang_dflash.srt.arg_groups.dflash_args import load_and_check_configs
    from sglang_dflash.srt.arg_groups.draft_attention import suited_backends

    unknown = [
        name for name in spec.environment if name not in _known_variables() and not hasattr(envs, name)
    ]
    problems = [f"SGLang knows no variable {name}" for name in unknown]
    # SGLang itself accepts any unique beginning of a flag; a command to be copied should spell it out.
    parser = _Parser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    try:
        args = parser.parse_args(spec.arguments)
    except ValueError as error:
        return [*problems, str(error)]
    if spec.variant != NO_SPECULATION:
        try:
            target, draft = load_and_check_configs(args)
            if spec.is_ours and args.attention_backend != CPU_BACKEND:
                # A server would choose another backend, with a warning. The measurement means this one.
                _, unsuited = suited_backends(args, draft, target)
                if reason := unsuited.get(args.speculative_draft_attention_backend or args.attention_backend):
                    problems.append(reason)
        except (ValueError, OSError) as error:
            problems.append(str(error))
    return problems
