"""Fill the model cards with the numbers that the other steps wrote.

python model_cards.py WORK_DIR TARGET_DIR DRAFT_DIR
python model_cards.py dflash2 WORK_DIR DRAFT_DIR     # after dflash2_gain.py --json WORK_DIR/dflash2_gain.json
python model_cards.py speculators WORK_DIR DRAFT_DIR GOLDEN_DIR  # a draft of the `speculators` package
"""

import datetime
import json
import sys
from pathlib import Path

from evaluate import summarise
from kinds import kind_of

LICENCE_NOTE = """## Licence

The weights are under the Apache License 2.0 (`Apache-2.0`), as this project is. The only
training text is the source of the Python standard library, which is under the PSF licence
(Python Software Foundation License Version 2, `PSF-2.0`). The model can reproduce pieces of it.
"""

TARGET_CARD = """# {target}

A {family} of {parameters:.1f} million parameters ({layers}, hidden size {hidden_size}) that writes text
shaped like Python. It exists to test speculative decoding on a CPU and is good
for nothing else. Made on {date} with the scripts
in `models/training`.

## How it was made

- Text: standard library of Python {python}, {train_files} files, {train_code_tokens:,} tokens, and
  {train_chat_documents:,} ChatML documents made from documented functions ({train_chat_tokens:,} tokens):
  the user asks with the docstring, the assistant answers with the source.
  {heldout_files} whole files ({heldout_tokens:,} tokens) are held out by a hash of their path.
- Tokenizer: byte-level BPE, 2,048 tokens, {characters_per_token} characters per token on held-out files.
  Special: `<|endoftext|>` 0, `<|im_start|>` 1, `<|im_end|>` 2, `<|mask|>` 3 (reserved for the draft).
- {steps:,} steps of 4,096 tokens ({tokens:,} tokens): Muon for matrices, AdamW for the rest.{embedding}
  Nine batches in ten have rows of 256 tokens, every tenth has 1,024 or 2,048.

| Step | Training loss | Held-out loss |
|---:|---:|---:|
{losses}

Losses are nats per token.

## Its greedy text

Mean share of distinct n-grams within one greedy continuation of {max_new} tokens on
{prompts} held-out prompts (n = 1, 2, 3, 4): {distinct}. Repetition flatters a draft, so read
acceptance figures beside these. {stopped} of the continuations stopped by themselves. The text loops: in
greedy continuations of {max_new} tokens, {repeated:.0%} of the tokens complete a 5-gram that the
continuation already has; the held-out code itself has {repeated_heldout:.0%}.

{licence}"""

DRAFT_CARD = """# {name}

A DFlash draft (block size 8, {layers} layers, {parameters:.1f} million parameters) for `{target}`, in z-lab's
checkpoint layout. Aux hidden states: outputs of the target's layers {layer_ids}. Embedding and LM head
are the target's. Made on {date} with the scripts in `models/training`.

## How it was made

Trained on stored rollouts of the target: mostly greedy continuations of training
prompts (code and ChatML), some sampled ones, some corpus rows, and some rows of
1,024 tokens, {training_rows:,} rows in all. {steps:,} steps of 256 blocks, cross entropy
towards the target's argmax, slot k weighted exp(-(k - 1) / 4){warm}. Final training
loss {loss}; accuracy per slot on training rollouts (given the true prefix, not the
accepted one): {slots}.

## Acceptance on held-out prompts

Greedy, bfloat16, {prompts} prompts from files that neither model has seen, up to {max_new} new
tokens. Accept length includes the bonus token, so it is tokens per target step.

| Prompts | Accept length | Steps | Accepted at position 1, 2, ... 7 |
|---|---:|---:|---|
{rows}

{blocks}Distinct 1-, 2-, 3-, 4-grams in the target's greedy text on the same prompts: {distinct}.

{licence}"""

BLOCK_SIZES = """Other block sizes, for information (the draft was trained with 8 only):

| Block size | Accept length |
|---:|---:|
{}

"""

SPECULATORS_CARD = """# {name}

A {kind} draft ({shape}, {layers}, draft vocabulary of {draft_vocab:,} of the target's
{vocab:,} tokens) for `{target}`, trained and saved by the classes of the `speculators` package {version}.
Every layer has a sliding window of {window:,}, the default of that package's command line.
Aux hidden states: inputs of the target's layers {layer_ids}. Made on {date} with
`models/training/train_speculators_draft.py`.

## How it was made

{steps:,} steps on the target's own continuations, cross entropy towards the target's argmax{warm}.
Final training loss {loss}; accuracy per drafted position on training rollouts (given the true prefix, not
the accepted one): {slots}.

## Acceptance on held-out prompts

Greedy, float32, by the package's own model without any cache, {prompts} prompts of {shortest} to {longest}
tokens, up to {max_new} new tokens. Accept length includes the bonus token, so it is tokens per target step.
Every step is in `test/srt/golden/{golden}/accepted.json`. The target's text loops, which flatters every
draft: see its model card.

| Accept length | Steps | Accepted at position 1, 2, ... {tokens} |
|---:|---:|---|
{rows}

{licence}"""


DFLASH2_CARD = """# {name}

A DFlash2 draft (block size 8, {layers} layers) for `{target}`, in z-lab's checkpoint layout: the backbone of
`{plain}`, convolutions of {taps} rows along the block in groups of {group} channels, and a selector
of rank {rank} over {top_k} candidates. Embedding and LM head are the target's. Made on {date} with the
scripts in `models/training`.

## How it was made

{steps:,} steps of 256 blocks{runs} from the plain draft's weights, on {rows:,} stored rollouts of the
target: code and chat, sampled at temperatures 1 and 0.7 and greedily, and corpus rows. The labels are the
target's whole distributions. Three losses, slot k weighted exp(-(k - 1) / 4): cross entropy of the base
logits (half weight), cross entropy of the selector's scores given the true previous token, and the part of
the target's distribution that these scores do not cover. At the end, on training rollouts and given the
true previous token: accuracy per slot {accuracy}; share covered {coverage}.

## Expected accept length on held-out prompts

Computed by `dflash2_gain.py`, bfloat16, every sixth prompt, 128 new tokens, bonus token included. Through a
server: `benchmark/results/dflash2.md`. The target's greedy text loops, which flatters every draft: see its
model card.

| Draft | {temperatures} |
|---|{rule}
{gains}

{licence}"""


def table(rows: list[tuple]) -> str:
    return "\n".join("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows)


def joined(values: list[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def parameters(directory: Path) -> float:
    """Return the millions of parameters of a bfloat16 checkpoint."""
    return (directory / "model.safetensors").stat().st_size / 2e6


def layers_in_words(config: dict) -> str:
    full = config["layer_types"].count("full_attention")
    if full == config["num_hidden_layers"]:
        return f"{full} layers"
    return f"{config['num_hidden_layers'] - full} GatedDeltaNet and {full} full attention layers"


def main(work_dir: Path, target_dir: Path, draft_dir: Path) -> None:
    names = ("corpus.json", "train_target.json", "train_draft.json", "evaluation.json")
    corpus, target, draft, report = (json.loads((work_dir / name).read_text()) for name in names)
    config = json.loads((target_dir / "config.json").read_text())
    shared = {
        "date": datetime.date.today(),
        "licence": LICENCE_NOTE,
        "prompts": report["prompts"],
        "max_new": report["max_new_tokens"],
        "target": target_dir.name,
        "distinct": " / ".join(f"{d:.2f}" for d in report["distinct_1_to_4_grams"]),
    }
    source = target.get("embedding_from")
    (target_dir / "README.md").write_text(
        TARGET_CARD.format(
            **corpus,
            **shared,
            steps=target["steps"],
            tokens=target["tokens"],
            parameters=parameters(target_dir),
            family=kind_of(config).family,
            layers=layers_in_words(config),
            hidden_size=config["hidden_size"],
            embedding=f"\n  The embedding started from `{source}`'s, reduced to this width."
            if source
            else "",
            stopped=report["stopped_by_themselves"],
            repeated=report["repeated_5_grams"],
            repeated_heldout=report["repeated_5_grams_heldout"],
            losses=table([(e["step"], e["train_loss"], e["heldout_loss"]) for e in target["log"]]),
        )
    )

    kinds = report["block_8"]
    sizes = sorted(
        (int(name.split("_")[1]), value["all"]["accept_length"])
        for name, value in report.items()
        if name.startswith("block_")
    )
    (draft_dir / "README.md").write_text(
        DRAFT_CARD.format(
            **shared,
            name=draft_dir.name,
            parameters=parameters(draft_dir),
            layers=draft["layers"],
            layer_ids=", ".join(map(str, kind_of(config).target_layer_ids)),
            training_rows=draft["rows"],
            warm=", after a warm start from a draft trained on other rollouts" if draft["warm_start"] else "",
            steps=draft["steps"],
            loss=draft["log"][-1]["loss"],
            slots=joined(draft["log"][-1]["slot_accuracy"]),
            rows=table(
                [
                    (kind, f"{v['accept_length']:.2f}", v["steps"], joined(v["accepted_per_position"]))
                    for kind, v in kinds.items()
                ]
            ),
            blocks=BLOCK_SIZES.format(table([(size, f"{length:.2f}") for size, length in sizes]))
            if len(sizes) > 1
            else "",
        )
    )


def speculators_card(work_dir: Path, draft_dir: Path, golden_dir: Path) -> None:
    config = json.loads((draft_dir / "config.json").read_text())
    layers, kind = config["transformer_layer_config"], config["speculators_model_type"]
    tokens = config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    log = json.loads((work_dir / f"train_speculators_{kind}.json").read_text())
    runs = json.loads((golden_dir / "accepted.json").read_text())
    found = summarise([accepted + 1 for run in runs for accepted in run["accepted"]], tokens + 1)
    lengths = [len(run["prompt"]) for run in runs]
    count = layers["num_hidden_layers"]
    (draft_dir / "README.md").write_text(
        SPECULATORS_CARD.format(
            name=draft_dir.name,
            golden=golden_dir.name,
            licence=LICENCE_NOTE,
            date=log["date"],
            kind={"dflash": "DFlash", "peagle": "P-EAGLE"}[kind],
            shape=f"block size {config['block_size']}"
            if kind == "dflash"
            else f"{tokens} tokens in parallel",
            layers=f"{count} layer{'s' * (count > 1)}",
            draft_vocab=config["draft_vocab_size"],
            vocab=layers["vocab_size"],
            window=layers["sliding_window"],
            version=config["speculators_version"],
            layer_ids=", ".join(
                map(
                    str,
                    config.get("eagle_aux_hidden_state_layer_ids") or config["aux_hidden_state_layer_ids"],
                )
            ),
            target=config["speculators_config"]["verifier"]["name_or_path"],
            steps=log["steps"],
            warm=", after a warm start from another draft" if log["warm_start"] else "",
            loss=log["log"][-1]["loss"],
            slots=joined(log["log"][-1]["slot_accuracy"]),
            prompts=len(runs),
            shortest=min(lengths),
            longest=max(lengths),
            max_new=max(len(run["output"]) for run in runs),
            tokens=tokens,
            rows=table(
                [(f"{found['accept_length']:.2f}", found["steps"], joined(found["accepted_per_position"]))]
            ),
        )
    )


def dflash2_card(work_dir: Path, draft_dir: Path) -> None:
    config = json.loads((draft_dir / "config.json").read_text())
    log, gain = (
        json.loads((work_dir / name).read_text()) for name in ("train_dflash2.json", "dflash2_gain.json")
    )
    options, last = config["dflash_config"], log["log"][-1]
    temperatures = list(gain["plain draft"])
    (draft_dir / "README.md").write_text(
        DFLASH2_CARD.format(
            name=draft_dir.name,
            plain=draft_dir.name.removesuffix("2"),
            target=draft_dir.name.removesuffix("-dflash2"),
            layers=config["num_hidden_layers"],
            taps=options["conv_kernel_size"],
            group=options["conv_group_size"],
            rank=options["selector_rank"],
            top_k=options["selector_top_k"],
            date=datetime.date.today(),
            licence=LICENCE_NOTE,
            steps=log["steps"],
            runs=", in two runs," if log["continued"] else "",
            rows=log["rows"],
            accuracy=joined(last["slot_accuracy"]),
            coverage=joined(last["slot_coverage"]),
            temperatures=" | ".join(f"T = {t}" for t in temperatures),
            rule="---:|" * len(temperatures),
            gains=table([(name, *found.values()) for name, found in gain.items()]),
        )
    )


if __name__ == "__main__":
    if sys.argv[1] == "dflash2":
        dflash2_card(*map(Path, sys.argv[2:4]))
    elif sys.argv[1] == "speculators":
        speculators_card(*map(Path, sys.argv[2:5]))
    else:
        main(*map(Path, sys.argv[1:4]))
