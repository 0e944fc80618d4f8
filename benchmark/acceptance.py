"""Accept length on a prompt set, through a live server, against expected values.

    python benchmark/acceptance.py        # starts a server for the bundled pair
    python benchmark/acceptance.py --url http://host:30000 --profile qwen3-8b-dflash \\
        --prompts mt-bench=mtbench.jsonl

benchmark/expected_acceptance.json holds an accept length per profile and prompt set, and the share of it that
must be reached. Exits with 1 below that, naming the set. The sets of prompt_sets.py need no file.
"""

import argparse
import contextlib
import itertools
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prompt_sets import CHAT_SETS, TEXT_SETS, PromptSet, RequestMaker, load
from serving import ROOT, Server, serve

EXPECTED = ROOT / "benchmark" / "expected_acceptance.json"


@dataclass(frozen=True)
class Acceptance:
    """Verified blocks: `kept[k]` of them kept k of `drafted_per_step` drafted tokens."""

    drafted_per_step: int
    kept: list[int]

    @property
    def drafts(self) -> int:
        return sum(self.kept)

    @property
    def accepted_tokens(self) -> int:
        return sum(k * blocks for k, blocks in enumerate(self.kept))

    @property
    def accept_length(self) -> float:
        """Tokens per verified block: 1 + accepted / drafts."""
        return 1 + self.accepted_tokens / self.drafts

    @property
    def rate(self) -> float:
        """Share of drafted tokens that were kept."""
        return self.accepted_tokens / (self.drafts * self.drafted_per_step)

    @property
    def by_position(self) -> list[float]:
        """Share of blocks in which the k-th drafted token was kept, k = 1.. drafted_per_step."""
        padded = self.kept + [0] * (self.drafted_per_step + 1 - len(self.kept))
        return [blocks / self.drafts for blocks in list(itertools.accumulate(padded[::-1]))[::-1][1:]]


def measure(server: Server, bodies: Sequence[dict], concurrency: int = 96) -> Acceptance:
    """Send every request, and add up the outcomes of the drafts."""
    answers = [answer["meta_info"] for answer in server.generate_many(bodies, concurrency)]
    drafts = sum(answer["spec_verify_ct"] for answer in answers)
    proposed = sum(answer["spec_num_proposed_drafts"] for answer in answers)
    return Acceptance(proposed // drafts, sum_histograms(answers))


def sum_histograms(infos: Sequence[dict]) -> list[int]:
    """Add up the histograms of answers: [k] counts the blocks that kept k drafted tokens.

    Empty without speculation.
    """
    histograms = [info.get("spec_correct_drafts_histogram") or [] for info in infos]
    return [sum(column) for column in itertools.zip_longest(*histograms, fillvalue=0)]


def report(name: str, measured: Acceptance) -> str:
    positions = " ".join(f"{share:.3f}" for share in measured.by_position)
    return (
        f"{name}: accept length {measured.accept_length:.3f}, {measured.drafts} drafts of "
        f"{measured.drafted_per_step} tokens, rate {measured.rate:.3f}, by position {positions}"
    )


def shortfall(name: str, measured: Acceptance, expected: dict) -> str | None:
    """Return a message if the accept length is below the expected one times its floor."""
    least = expected["accept_length"] * expected["floor"]
    if measured.accept_length >= least:
        return None
    return (
        f"{name}: accept length {measured.accept_length:.3f} is below {least:.3f} "
        f"({expected['floor']} x {expected['accept_length']})"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profile", default="tiny-dflash", help="an entry of expected_acceptance.json")
    parser.add_argument("--url", help="a running server; default: start one with the profile's arguments")
    parser.add_argument(
        "--prompts", nargs="+", default=[], metavar="SET=FILE", help="JSON lines with text or messages"
    )
    parser.add_argument("--max-new-tokens", type=int)
    args = parser.parse_args()
    profile = json.loads(EXPECTED.read_text())[args.profile]
    files = {name: Path(file).absolute() for name, file in (pair.split("=", 1) for pair in args.prompts)}
    os.chdir(ROOT)  # the profiles name the bundled models from here
    running = (
        contextlib.nullcontext(Server(args.url, None, None)) if args.url else serve(*profile["server_args"])
    )
    failures, maker = [], RequestMaker(_target(profile["server_args"]))
    params = {"temperature": 0, "max_new_tokens": args.max_new_tokens or profile["max_new_tokens"]}
    with running as server:
        if any("speculative_width" in state for state in server.get("/server_info")["internal_states"]):
            parser.error(
                "this server chooses the verify width, but accept lengths are compared over whole blocks: "
                "start it with --no-speculative-adaptive"
            )
        for name, expected in profile["sets"].items():
            chosen = _prompts(name, files)
            if chosen is None:
                print(f"{name}: skipped, no prompts given (--prompts {name}=FILE)")
                continue
            measured = measure(server, [maker.body(prompt, params) for prompt in chosen.prompts])
            print(report(name, measured), flush=True)
            failures.append(shortfall(name, measured, expected))
    failures = [failure for failure in failures if failure]
    print("\n".join(failures), file=sys.stderr)
    return 1 if failures else 0


def _target(arguments: Sequence[str]) -> str:
    return arguments[arguments.index("--model-path") + 1]


def _prompts(name: str, files: dict[str, Path]) -> PromptSet | None:
    if name in files:
        return load(f"{name}={files[name]}")
    return load(name) if name in (*CHAT_SETS, *TEXT_SETS) else None


if __name__ == "__main__":
    sys.exit(main())
