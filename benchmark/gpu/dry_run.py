"""Check of every server command, without a GPU and without starting a server."""

import argparse
from collections.abc import Sequence

from gpu.plans import NO_SPECULATION, Part, Plan


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise ValueError(message)


def check(parts: Sequence[Part]) -> list[str]:
    """Print the parts and their commands. Returns one line per problem."""
    problems = []
    for part in parts:
        print(f"\n{part.name}")
        for plan in part.servers:
            found = problems_of(plan)
            print("  " + plan.command(), *(f"    PROBLEM: {problem}" for problem in found), sep="\n")
            problems += [f"{part.name}: {problem}" for problem in found]
    return problems


def problems_of(plan: Plan) -> list[str]:
    """List what SGLang refuses of this server: flags, environment, configs."""
    from sglang.srt.environ import envs
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()  # as a server does first; ours reads configs that SGLang's own parser rejects
    from sglang_dflash.srt.arg_groups.dflash_args import load_and_check_configs
    from sglang_dflash.srt.arg_groups.draft_attention import choose_draft_attention

    problems = [f"SGLang knows no variable {name}" for name in plan.environment if not hasattr(envs, name)]
    # SGLang itself accepts any unique beginning of a flag; a command to be copied should spell it out.
    parser = _Parser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    try:
        args = parser.parse_args(plan.arguments)
    except ValueError as error:
        return [*problems, str(error)]
    if plan.variant != NO_SPECULATION:
        try:
            target, draft = load_and_check_configs(args)
            if plan.is_ours and args.attention_backend != "torch_native":
                choose_draft_attention(args, args.attention_backend, draft, target)
        except (ValueError, OSError) as error:
            problems.append(str(error))
    return problems
