"""Cost of a draft's quantization, layer by layer: error of weights, accept length, likelihood.

    python quantization_cost.py TARGET_DIR QUANTIZED_DRAFT_DIR UNQUANTIZED_DRAFT_DIR [--prompts FILE] [--json]

Both drafts are dequantized and run in plain PyTorch by the doctor of sglang-dflash, which must be installed.
Likelihood is compared with the unquantized draft's, and the gain is negative if something is lost. Exit
status: 0, 1 if a layer's weights are another draft's or wrong, 2 if that cannot be measured.
"""

import argparse
import json
import sys
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from sglang_dflash.srt.doctor.interpretations import AS_CONFIGURED, Interpretation, LikelihoodGain, compare
from sglang_dflash.srt.doctor.measure import Acceptance, TargetTranscripts, draft_texts, load_draft, observe
from sglang_dflash.srt.doctor.pair import (
    FAULT,
    PROMPTS,
    BadInput,
    Checkpoint,
    Finding,
    Pair,
    fault,
    note,
    read_prompts,
)
from sglang_dflash.srt.doctor.plain_drafts import PlainDraft

# Relative error of a weight: 0.11 is usual for four bits, 0.03 for eight. Another draft's weights give 1.4.
ANOTHER, LARGE = 0.3, {"4": 0.22, "8": 0.06}
COLUMNS = ("", "scheme", "weight error", "accept length", "likelihood of the target's tokens")


@dataclass(frozen=True)
class LayerCost:
    """Cost of quantizing one layer of the draft, all others as they were.

    Attributes:
        weight_errors: relative errors by module.
        evidence: likelihood against the unquantized draft's.
    """

    name: str
    schemes: tuple[str, ...]
    weight_errors: dict[str, float]
    acceptance: Acceptance
    evidence: LikelihoodGain


@dataclass(frozen=True)
class QuantizationCost:
    """Cost of quantization; `evidence` is that of all layers together."""

    unquantized: Acceptance
    quantized: Acceptance
    evidence: LikelihoodGain
    layers: list[LayerCost]


def measure_cost(pair: Pair, unquantized: Pair, observed: TargetTranscripts) -> QuantizationCost:
    """Draft at every position of the target's texts, with one layer quantized at a time.

    Raises:
        BadInput: `pair` is not quantized, or `unquantized` is not the same draft before.
    """
    schemes = pair.examined_tensors.schemes if pair.is_parsed else {}
    if not schemes:
        raise BadInput(f"{pair.draft.name}: has no quantized layers that can be read")
    if not unquantized.is_parsed or unquantized.examined_tensors.schemes:
        raise BadInput(f"{unquantized.draft.name}: is no unquantized draft that can be read")
    if unquantized.config != pair.config:
        raise BadInput(f"{unquantized.draft.name}: its config is another one than {pair.draft.name}'s")
    draft, before = load_draft(pair, observed.target), load_draft(unquantized, observed.target)

    reference, drafts = draft_texts(before, observed, AS_CONFIGURED)
    groups: dict[str, list[str]] = {}
    for module in sorted(schemes, key=lambda module: (_place(module), module)):
        groups.setdefault(_place(module)[1], []).append(module)
    layers = []
    for name, modules in groups.items():
        own = {f"{module}.weight": draft.weights[f"{module}.weight"] for module in modules}
        interpretation = Interpretation("", changes={"weights": {**before.weights, **own}})
        acceptance, found = draft_texts(before, observed, interpretation)
        errors = {module: _weight_error(draft, before, module) for module in modules}
        names = tuple(sorted({schemes[module].name for module in modules}))
        layers.append(LayerCost(name, names, errors, acceptance, compare(drafts, found)))
    acceptance, found = draft_texts(draft, observed, AS_CONFIGURED)
    return QuantizationCost(reference, acceptance, compare(drafts, found), layers)


def findings(cost: QuantizationCost) -> Iterator[Finding]:
    """Judge the errors of the weights."""
    for layer in cost.layers:
        for module, error in layer.weight_errors.items():
            problem = f"{module} differs from the unquantized draft's by {error:.2f}"
            if error > ANOTHER:
                yield fault(problem, "It was quantized wrongly, or from another draft: quantize it again")
            elif any(error > large for bits, large in LARGE.items() if bits in "".join(layer.schemes)):
                advice = f"Leave it out of the quantization if {layer.name} costs acceptance"
                yield note(f"{problem}, more than usual", advice)


def text(cost: QuantizationCost) -> str:
    """Format the cost as a table."""
    rows = [COLUMNS, ("unquantized", "", "", f"{cost.unquantized.length:.2f}", "(the reference)")]
    for layer in cost.layers:
        error = f"{max(layer.weight_errors.values()):.3f}"
        length = f"{layer.acceptance.length:.2f}"
        rows.append((f"{layer.name} quantized", ", ".join(layer.schemes), error, length, str(layer.evidence)))
    rows.append(("all quantized", "", "", f"{cost.quantized.length:.2f}", str(cost.evidence)))
    return "\n".join(
        f"{name:<24}{scheme:<10}{error:>13}{length:>15}   {words}"
        for name, scheme, error, length, words in rows
    )


def _place(module: str) -> tuple[int, str]:
    """Return the number and the name of a module's layer; -1 and its own name without one."""
    parts = module.split(".")
    return (int(parts[1]), ".".join(parts[:2])) if parts[0] == "layers" else (-1, module)


def _weight_error(draft: PlainDraft, before: PlainDraft, module: str) -> float:
    found, expected = (d.weights[f"{module}.weight"].float() for d in (draft, before))
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target", metavar="TARGET_DIR")
    parser.add_argument("quantized", metavar="QUANTIZED_DRAFT_DIR")
    parser.add_argument("unquantized", metavar="UNQUANTIZED_DRAFT_DIR")
    parser.add_argument("--prompts", type=Path, help="as the doctor's")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--device", help="default: cuda if there is one")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--json", action="store_true", help="print the cost as JSON")
    args = parser.parse_args(arguments)
    try:
        prompts = PROMPTS if args.prompts is None else read_prompts(args.prompts)
        target = Checkpoint.open(args.target, with_tensors=False)
        quantized, unquantized = (
            Pair(target, Checkpoint.open(path, with_tensors=True))
            for path in (args.quantized, args.unquantized)
        )
        observed = observe(target, prompts, args.max_new_tokens, args.device, getattr(torch, args.dtype))
        cost = measure_cost(quantized, unquantized, observed)
    except (BadInput, OSError) as error:
        parser.exit(2, f"quantization_cost: {error}\n")
    except Exception:
        traceback.print_exc()
        parser.exit(2)  # Python would exit with 1
    found = list(findings(cost))
    print(json.dumps(asdict(cost), indent=1) if args.json else "\n".join([text(cost), "", *map(str, found)]))
    return int(any(finding.level == FAULT for finding in found))


if __name__ == "__main__":
    sys.exit(main())
