"""Write the list of published drafts in docs/drafts.md from the configs that the tests read.

    python tools/published_drafts.py            # prints the list
    python tools/published_drafts.py --write    # writes it between the two marks of the page

The configs are in test/srt/golden/published_configs.toml. Each goes through the readers of a start.
"""

import argparse
import copy
import tempfile
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang_dflash.srt.configs import draft_formats
from sglang_dflash.srt.configs.draft_kinds import read_draft_config

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "drafts.md"
TABLE = tomllib.loads((ROOT / "test" / "srt" / "golden" / "published_configs.toml").read_text())
CASES = TABLE["config"]
FIRST = "Qwen/Qwen3-8B"
MARKS = ("<!-- written by tools/published_drafts.py -->\n", "<!-- end -->\n")


def merged(base: Any, changes: Any) -> Any:
    """Return a copy of a config with changes at every depth."""
    if not (isinstance(base, dict) and isinstance(changes, dict)):
        return copy.deepcopy(changes)
    return {**base, **{name: merged(base.get(name), value) for name, value in changes.items()}}


def config_of(case: dict) -> dict:
    """Return the config of a row of the table."""
    config = merged(TABLE["base"][case["base"]], case.get("with", {}))
    return {name: value for name, value in config.items() if name not in case.get("without", ())}


def read(config: dict, checkpoint: str) -> tuple[str, Any]:
    """Return what a start makes of a config: `read` and the draft, or `falls_back` or `refused` and why."""
    found = draft_formats.checkpoint_problems(config, checkpoint)
    if found:
        falls_back = all(finding.builtin_supports for finding in found)
        return "falls_back" if falls_back else "refused", "; ".join(finding.what for finding in found)
    try:
        flat = draft_formats.flat_config(config, checkpoint, target_layers=36)
        return "read", read_draft_config(SimpleNamespace(**flat), checkpoint)
    except ValueError as error:
        return "refused", str(error)


def row(case: dict) -> str:
    """Return a draft's row of the page."""
    config = config_of(case)
    with tempfile.TemporaryDirectory() as folder:
        outcome, draft = read(config, folder)
    kind, block, command = "DFlash", "", "built-in"  # of a draft that falls back
    if outcome == "read":
        kind, block = draft.kind, str(draft.speculative_tokens + 1)
        if draft.sliding_window is not None:
            block += f", window {draft.sliding_window}"
        command = "PEAGLE" if kind == "P-EAGLE" else "DFLASH"
        if "speculators_model_type" in config:
            command = "alone"
    elif outcome == "refused":
        kind, command = ("DSpark", "DSPARK") if "DSPARK" in draft else ("", "refused")
    cells = (case["target"], f"`{case['page']}`", kind, block, command)
    return "| " + " | ".join(cells) + " |"


def drafts_list() -> str:
    """Return the list: a table of the drafts by target, and the names of the unseen ones."""
    cases = [case for case in CASES if "page" in case]
    targets = [FIRST, *dict.fromkeys(case["target"] for case in cases if case["target"] != FIRST)]
    lines = [
        "| target | draft | format | block | type |",
        "|---|---|---|---|---|",
        *(row(case) for target in targets for case in cases if case["target"] == target),
    ]
    unseen = ", ".join(f"`{name}`" for name in TABLE["unseen"])
    return "\n".join((*lines, "", f"Named in public text, config not seen: {unseen}.", ""))


def parts(page: str) -> tuple[str, str, str]:
    """Split the page at its marks: before, the list, after."""
    before, _, rest = page.partition(MARKS[0])
    inside, _, after = rest.partition(MARKS[1])
    return before + MARKS[0], inside, MARKS[1] + after


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write docs/drafts.md")
    if parser.parse_args().write:
        before, _, after = parts(PAGE.read_text())
        PAGE.write_text(f"{before}\n{drafts_list()}\n{after}")
    else:
        print(drafts_list(), end="")


if __name__ == "__main__":
    main()
