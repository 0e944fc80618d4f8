"""Golden data for the parity tests: drafts of the `speculators` package's own model.

Logits of a step, and accept lengths. Nothing is cached and nothing reimplemented: every step runs Hugging
Face's target over all tokens and the library's training forward with a single anchor, in float32. Runs in the
library's environment (README.md).

    python speculators_golden.py TARGET_DIR DRAFT_DIR ../../benchmark/prompts/heldout.jsonl OUTPUT_DIR
"""

import argparse
import json
import os
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from evaluate import summarise
from speculators.model import SpeculatorModel
from speculators.models.attention import create_float_mask
from speculators.models.peagle import core as peagle
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

NUM_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 12, (12, 200), 48
LOGIT_PROMPTS = 3


def dflash_step(draft, tokens: list[int], aux: torch.Tensor) -> torch.Tensor:
    """Return draft logits [B, draft vocab] of the block anchored at the last token.

    aux: [n, A * H]; its last row is unused.
    """
    anchor, padding = len(tokens) - 1, draft.config.block_size + 1
    length = len(tokens) + padding
    loss_mask = torch.zeros(1, length)
    loss_mask[0, anchor] = 1
    hidden = torch.zeros(1, length, aux.shape[1])
    hidden[0, :anchor] = aux[:anchor]
    _, logits, _, _, _ = draft._backbone_forward(
        hidden_states=hidden,
        input_ids=torch.tensor([tokens + [0] * padding]),
        loss_mask=loss_mask,
        verifier_last_hidden_states=torch.zeros(1, length, draft.hidden_size),
        document_ids=torch.zeros(1, length, dtype=torch.long),
        max_anchors=1,
    )
    return logits[0]


def peagle_step(draft, tokens: list[int], aux: torch.Tensor) -> torch.Tensor:
    """Return draft logits [K, draft vocab] after the tokens.

    aux: [n, A * H], or without the last row, which is unused. Real rows are (x[t + 1], g[t]); the last of
    them starts one chain, in place of the randomly sampled ones.
    """
    real, depths = len(tokens) - 1, draft.config.speculators_config.proposal_methods[0].speculative_tokens
    padding = depths - 1  # the forward reads ids and states at every row's position, then replaces the masks'
    length = real + padding
    chain = torch.cat((torch.arange(real), torch.full((padding,), real - 1)))
    depth = torch.cat((torch.zeros(real, dtype=torch.long), torch.arange(1, depths)))
    options, _ = draft.get_trainer_kwargs(loss_fn="ce", loss_implementation="eager", num_depths=depths)
    rows = []
    hook = draft.lm_head.register_forward_hook(lambda _, inputs, logits: rows.append(logits))
    with mock.patch.object(peagle, "generate_cod_sample_indices", lambda **_: (chain, depth)):
        draft(
            hidden_states=torch.cat((aux[:real], torch.zeros(padding, aux.shape[1])))[None],
            input_ids=torch.tensor([tokens[1:] + [0] * padding]),
            document_ids=torch.zeros(1, length, dtype=torch.long),
            verifier_last_hidden_states=torch.zeros(1, length, draft.hidden_size),
            **options,
        )
    hook.remove()
    return rows[0][0, -depths:]


def load_draft(draft_dir: Path) -> SpeculatorModel:
    draft = SpeculatorModel.from_pretrained(str(draft_dir), dtype=torch.float32).eval()
    # Loading picks flex attention, which wants a GPU; training on a CPU used the eager kind.
    draft.config.transformer_layer_config._attn_implementation = draft._attn_impl = "eager"
    draft._create_mask_fn = create_float_mask
    return draft


class Reference:
    def __init__(self, target_dir: Path, draft_dir: Path):
        self.target = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32).eval()
        self.draft = load_draft(draft_dir)
        is_peagle = isinstance(self.draft, peagle.PEagleDraftModel)
        self.step = peagle_step if is_peagle else dflash_step
        self.first_drafted = 0 if is_peagle else 1  # slot 0 of a DFlash block is its anchor

    @torch.no_grad()
    def run_target(self, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits [n, vocab] and aux hidden states [n, A * H], in Hugging Face's numbering."""
        out = self.target(input_ids=torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
        states = [out.hidden_states[i][0] for i in self.draft.target_layer_ids]
        return out.logits[0], torch.cat(states, dim=-1)

    @torch.no_grad()
    def draft_logits(self, tokens: list[int], aux: torch.Tensor) -> torch.Tensor:
        return self.step(self.draft, tokens, aux)

    def accepted_per_step(self, prompt: list[int]) -> dict:
        """Decode greedily; return tokens, kept drafts per step, and the nearest tie."""
        logits, aux = self.run_target(prompt)
        tokens = prompt + [int(logits[-1].argmax())]
        kept, closest = [], np.inf
        while len(tokens) < len(prompt) + NEW_TOKENS:
            rows = self.draft_logits(tokens, aux)[self.first_drafted :]
            best = rows.topk(2).values
            closest = min(closest, float((best[:, 0] - best[:, 1]).min()))
            drafted = rows.argmax(-1)
            drafted = (drafted + self.draft.d2t[drafted]).tolist()
            logits, aux = self.run_target(tokens + drafted)
            wanted = logits[len(tokens) - 1 :].argmax(-1).tolist()
            accepted = next((k for k, token in enumerate(drafted) if token != wanted[k]), len(drafted))
            tokens += wanted[: accepted + 1]
            kept.append(accepted)
        output = tokens[len(prompt) :]
        logits, _ = self.run_target(tokens)
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == output, "not the target's greedy text"
        return {"prompt": prompt, "output": output, "accepted": kept, "smallest_margin": round(closest, 6)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target_dir", type=Path)
    parser.add_argument("draft_dir", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("output_dir", type=Path)
    args = parser.parse_args()
    for name, path in vars(args).items():
        setattr(args, name, path.absolute())
    os.chdir(args.target_dir.parent)  # there the target's name in the checkpoint is a path
    tokenizer = Tokenizer.from_file(str(args.target_dir / "tokenizer.json"))
    prompts = [json.loads(line) for line in args.prompts.read_text().splitlines()]
    low, high = PROMPT_TOKENS
    code = [p["text"] for p in prompts if not p.get("chat") and low <= p["num_tokens"] <= high]
    fitting = [tokenizer.encode(text).ids for text in code]
    chosen = fitting[:: max(1, len(fitting) // NUM_PROMPTS)][:NUM_PROMPTS]
    reference = Reference(args.target_dir, args.draft_dir)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    runs = [reference.accepted_per_step(prompt) for prompt in chosen]
    (args.output_dir / "accepted.json").write_text("[\n" + ",\n".join(map(json.dumps, runs)) + "\n]\n")
    logits = {}
    for i, prompt in enumerate(chosen[:LOGIT_PROMPTS]):
        _, aux = reference.run_target(prompt)
        logits[f"prompt_{i}"] = np.array(prompt)
        logits[f"logits_{i}"] = reference.draft_logits(prompt, aux).numpy()
    np.savez_compressed(args.output_dir / "block_logits.npz", **logits)
    drafted = reference.draft.config.speculators_config.proposal_methods[0].speculative_tokens
    print(len(runs), "prompts", summarise([k + 1 for run in runs for k in run["accepted"]], drafted + 1))


if __name__ == "__main__":
    main()
