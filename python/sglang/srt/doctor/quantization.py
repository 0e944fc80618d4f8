"""Cost of a draft's quantization, layer by layer, for `doctor --unquantized`."""

from collections.abc import Iterator
from dataclasses import dataclass

from sglang_dflash.srt.doctor.measure import Acceptance, Observed, draft_texts, load_draft
from sglang_dflash.srt.doctor.pair import BadInput, Finding, Pair, fault, note
from sglang_dflash.srt.doctor.plain_drafts import PlainDraft
from sglang_dflash.srt.doctor.readings import AS_CONFIGURED, Evidence, Reading, compare

# Relative error of a weight: 0.11 is usual for four bits, 0.03 for eight. Another draft's weights give 1.4.
_ANOTHER, _LARGE = 0.3, {"4": 0.22, "8": 0.06}


@dataclass(frozen=True)
class LayerCost:
    """Cost of quantizing one layer of the draft, all others as they were.

    `weight_errors` are relative errors by module. `evidence` is against the unquantized draft, and its gain
    is negative if something is lost.
    """

    name: str
    schemes: tuple[str, ...]
    weight_errors: dict[str, float]
    acceptance: Acceptance
    evidence: Evidence


@dataclass(frozen=True)
class QuantizationCost:
    """Cost of quantization; `evidence` is that of all layers together."""

    unquantized: Acceptance
    quantized: Acceptance
    evidence: Evidence
    layers: list[LayerCost]


def measure_cost(pair: Pair, unquantized: Pair, observed: Observed) -> QuantizationCost:
    """Draft at every position of the target's texts, with one layer quantized at a time.

    Raises:
        BadInput: `pair` is not quantized, or `unquantized` is not the same draft before.
    """
    schemes = pair.packed_modules.schemes
    if not schemes:
        raise BadInput(f"{pair.draft.name}: has no quantized layers, so --unquantized compares nothing")
    if not unquantized.is_parsed or unquantized.packed_modules.schemes:
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
        reading = Reading("", changes={"weights": {**before.weights, **own}})
        acceptance, found = draft_texts(before, observed, reading)
        errors = {module: _weight_error(draft, before, module) for module in modules}
        names = tuple(sorted({schemes[module].name for module in modules}))
        layers.append(LayerCost(name, names, errors, acceptance, compare(drafts, found)))
    acceptance, found = draft_texts(draft, observed, AS_CONFIGURED)
    return QuantizationCost(reference, acceptance, compare(drafts, found), layers)


def findings(cost: QuantizationCost) -> Iterator[Finding]:
    """Judge the errors of the weights."""
    for layer in cost.layers:
        for module, error in layer.weight_errors.items():
            if error > _ANOTHER:
                problem = f"{module} differs from the unquantized draft's by {error:.2f}"
                yield fault(problem, "It was quantized wrongly, or from another draft: quantize it again")
            elif any(error > large for bits, large in _LARGE.items() if bits in "".join(layer.schemes)):
                problem = f"{module} differs from the unquantized draft's by {error:.2f}, more than usual"
                yield note(problem, f"Leave it out of the quantization if {layer.name} costs acceptance")


def table(cost: QuantizationCost) -> list[tuple[str, str, str, str, str]]:
    """Return rows of text: layer, schemes, largest weight error, accept length, likelihood."""
    rows = [("unquantized", "", "", f"{cost.unquantized.length:.2f}", "(the reference)")]
    for layer in cost.layers:
        error = f"{max(layer.weight_errors.values()):.3f}"
        length = f"{layer.acceptance.length:.2f}"
        rows.append((f"{layer.name} quantized", ", ".join(layer.schemes), error, length, str(layer.evidence)))
    rows.append(("all quantized", "", "", f"{cost.quantized.length:.2f}", str(cost.evidence)))
    return rows


COLUMNS = ("", "scheme", "weight error", "accept length", "likelihood of the target's tokens")


def text(cost: QuantizationCost) -> str:
    """Format the cost as a table."""
    rows = [COLUMNS, *table(cost)]
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
