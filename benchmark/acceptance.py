"""Accept length on a prompt set, through a live server, against expected values.

    python benchmark/acceptance.py        # starts a server for the bundled pair
    python benchmark/acceptance.py --url http://host:30000 --profile qwen3-8b-dflash \\
        --prompts mt-bench=mtbench.jsonl

benchmark/expected_acceptance.json holds an accept length per profile and prompt set, and the share of it that
must be reached. Exits with 1 below that, naming the set, and with 2 if a set was not measured, whatever the
reason. The sets of prompt_sets.py need no file.

Lengths are over all verified blocks. Published ones ("published" in the profile) are means over prompts, each
answered alone and without thinking.
"""

import contextlib
import itertools
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from prompt_sets import CHAT_SETS, TEXT_SETS, RequestMaker, load
from serving import ROOT, WHOLE_BLOCKS, Server, documented, serve, verdict_or_2

EXPECTED = ROOT / "benchmark" / "expected_acceptance.json"


@dataclass(frozen=True)
class Acceptance:
    """Verified blocks: `kept[k]` of them kept k of `drafted_per_step` drafted tokens.

    by_prompt: accept length of each answer.
    """

    drafted_per_step: int
    kept: list[int]
    by_prompt: Sequence[float] = ()

    @property
    def drafts(self) -> int:
        return sum(self.kept)

    @property
    def accepted_tokens(self) -> int:
        return sum(k * blocks for k, blocks in enumerate(self.kept))

    @property
    def accept_length(self) -> float:
        """Tokens per verified block: 1 + accepted / drafts. 1 without drafts."""
        return 1 + self.accepted_tokens / max(1, self.drafts)

    @property
    def rate(self) -> float:
        """Share of drafted tokens that were kept. 0 without drafts."""
        return self.accepted_tokens / max(1, self.drafts * self.drafted_per_step)

    @property
    def by_position(self) -> list[float]:
        """Share of blocks in which the k-th drafted token was kept, k = 1.. drafted_per_step.

        Empty without drafts.
        """
        if not self.drafts:
            return []
        padded = self.kept + [0] * (self.drafted_per_step + 1 - len(self.kept))
        reached = list(itertools.accumulate(padded[::-1]))[::-1]
        return [blocks / self.drafts for blocks in reached[1:]]


def measure(server: Server, bodies: Sequence[dict], concurrency: int = 96) -> Acceptance:
    """Send every request, and add up the outcomes of the drafts. Answers may have none."""
    infos = [answer["meta_info"] for answer in server.generate_many(bodies, concurrency)]
    lengths = tuple(_outcomes([info]).accept_length for info in infos)
    return replace(_outcomes(infos), by_prompt=lengths)


def _outcomes(infos: Sequence[dict]) -> Acceptance:
    drafts = sum(info.get("spec_verify_ct", 0) for info in infos)
    proposed = sum(info.get("spec_num_proposed_drafts", 0) for info in infos)
    return Acceptance(proposed // max(1, drafts), sum_histograms(infos))


def sum_histograms(infos: Sequence[dict]) -> list[int]:
    """Add up the histograms of answers: [k] counts the blocks that kept k drafted tokens.

    Empty without speculation.
    """
    histograms = [info.get("spec_correct_drafts_histogram") or [] for info in infos]
    return [sum(column) for column in itertools.zip_longest(*histograms, fillvalue=0)]


def report(name: str, measured: Acceptance) -> str:
    positions = " ".join(f"{share:.3f}" for share in measured.by_position)
    mean = f" ({fmean(measured.by_prompt):.3f} by prompt)" if measured.by_prompt else ""
    return (
        f"{name}: accept length {measured.accept_length:.3f}{mean}, {measured.drafts} drafts of "
        f"{measured.drafted_per_step} tokens, rate {measured.rate:.3f}, by position {positions}"
    )


def shortfall(name: str, length: float, expected: dict) -> str | None:
    """Return a message if an accept length is below the expected one times its floor."""
    least = expected["accept_length"] * expected["floor"]
    if length >= least:
        return None
    return (
        f"{name}: accept length {length:.3f} is below {least:.3f} "
        f"({expected['floor']} x {expected['accept_length']})"
    )


@verdict_or_2
def main() -> int:
    parser = documented(__doc__)
    profiles = json.loads(EXPECTED.read_text())
    parser.add_argument("--profile", default="tiny-dflash", choices=profiles)
    parser.add_argument("--url", help="a running server; default: start one with the profile's arguments")
    help_prompts = "JSON lines with text or messages"
    parser.add_argument(
        "--prompts", nargs="+", type=set_and_file, default=[], metavar="SET=FILE", help=help_prompts
    )
    parser.add_argument("--max-new-tokens", type=int)
    args = parser.parse_args()
    profile, files = profiles[args.profile], dict(args.prompts)
    if unknown := sorted(set(files) - set(profile["sets"])):
        parser.error(
            f"profile {args.profile} has no set {', '.join(unknown)}, only {', '.join(profile['sets'])}"
        )
    os.chdir(ROOT)  # the profiles name the bundled models from here
    sets = {name: _prompts(name, files) for name in profile["sets"]}
    skipped = [name for name, prompts in sets.items() if not prompts]
    for name in skipped:
        print(f"{name}: skipped, no prompts given (--prompts {name}=FILE)", file=sys.stderr)
    if len(skipped) == len(sets):
        return 2
    is_published = profile.get("published", False)
    arguments = profile["server_args"]
    template = {"enable_thinking": False} if is_published else {}
    maker = RequestMaker(arguments[arguments.index("--model-path") + 1], **template)
    params = {"temperature": 0, "max_new_tokens": args.max_new_tokens or profile["max_new_tokens"]}
    failures = []
    running = contextlib.nullcontext(Server(args.url, None, None))
    with running if args.url else serve(*arguments, WHOLE_BLOCKS) as server:
        if any("speculative_width" in state for state in server.get("/server_info")["internal_states"]):
            parser.error(
                "this server chooses the verify width, but accept lengths are compared over whole blocks: "
                "start it with --no-speculative-adaptive"
            )
        for name, prompts in sets.items():
            if not prompts:
                continue
            bodies = [maker.body(prompt, params) for prompt in prompts]
            measured = measure(server, bodies, *([1] if is_published else []))
            print(report(name, measured), flush=True)
            length = fmean(measured.by_prompt) if is_published else measured.accept_length
            failures.append(shortfall(name, length, profile["sets"][name]))
    failures = [failure for failure in failures if failure]
    print("\n".join(failures), file=sys.stderr)
    return 1 if failures else 2 if skipped else 0


def set_and_file(pair: str) -> tuple[str, Path]:
    name, file = pair.split("=", 1)
    return name, Path(file).absolute()


def _prompts(name: str, files: dict[str, Path]) -> Sequence[dict]:
    if name in files:
        return load(f"{name}={files[name]}").prompts
    return load(name).prompts if name in (*CHAT_SETS, *TEXT_SETS) else ()


if __name__ == "__main__":
    sys.exit(main())
