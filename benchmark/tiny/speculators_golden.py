"""What the `speculators` package's own model drafts: block logits and accept lengths, for the parity tests.

Nothing is cached and nothing reimplemented: every step runs Hugging Face's target over all tokens and the library's
training forward with a single anchor, in float32. Runs in the library's environment (README.md).

    python speculators_golden.py TARGET_DIR DRAFT_DIR prompts/heldout.jsonl OUTPUT_DIR
"""

import argparse
import json
import os
from pathlib import Path

import numpy as np
import torch
from speculators.model import SpeculatorModel
from speculators.models.attention import create_float_mask
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

NUM_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 12, (12, 200), 48
LOGIT_PROMPTS = 3


class Reference:
    def __init__(self, target_dir: Path, draft_dir: Path):
        self.target = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32).eval()
        self.draft = SpeculatorModel.from_pretrained(str(draft_dir), dtype=torch.float32).eval()
        # Loading picks flex attention, which wants a GPU; training on a CPU used the eager kind.
        self.draft.config.transformer_layer_config._attn_implementation = self.draft._attn_impl = "eager"
        self.draft._create_mask_fn = create_float_mask
        self.block_size = self.draft.config.block_size

    @torch.no_grad()
    def run_target(self, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [n, vocab], and aux hidden states [n, A * H] by Hugging Face's own numbering."""
        out = self.target(input_ids=torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
        ids = self.draft.config.aux_hidden_state_layer_ids
        return out.logits[0], torch.cat([out.hidden_states[i][0] for i in ids], dim=-1)

    @torch.no_grad()
    def draft_block(self, tokens: list[int], aux: torch.Tensor) -> torch.Tensor:
        """Draft logits [B, draft vocab] with the last token as anchor; aux [n - 1, A * H] of the tokens before it."""
        anchor, padding = len(tokens) - 1, self.block_size + 1
        length = len(tokens) + padding
        loss_mask = torch.zeros(1, length)
        loss_mask[0, anchor] = 1
        hidden = torch.zeros(1, length, aux.shape[1])
        hidden[0, :anchor] = aux[:anchor]
        _, logits, _, _, _ = self.draft._backbone_forward(
            hidden_states=hidden,
            input_ids=torch.tensor([tokens + [0] * padding]),
            loss_mask=loss_mask,
            verifier_last_hidden_states=torch.zeros(1, length, self.target.config.hidden_size),
            document_ids=torch.zeros(1, length, dtype=torch.long),
            max_anchors=1,
        )
        return logits[0]

    def accepted_per_step(self, prompt: list[int]) -> dict:
        """Greedy speculative decoding: tokens, and how many drafted tokens each step kept; near-ties noted."""
        logits, aux = self.run_target(prompt)
        tokens = prompt + [int(logits[-1].argmax())]
        kept, closest = [], np.inf
        while len(tokens) < len(prompt) + NEW_TOKENS:
            block = self.draft_block(tokens, aux)[1:]
            best = block.topk(2).values
            closest = min(closest, float((best[:, 0] - best[:, 1]).min()))
            drafted = block.argmax(-1)
            drafted = (drafted + self.draft.d2t[drafted]).tolist()
            logits, aux = self.run_target(tokens + drafted)
            wanted = logits[len(tokens) - 1 :].argmax(-1).tolist()
            accepted = next((k for k, token in enumerate(drafted) if token != wanted[k]), len(drafted))
            tokens += wanted[: accepted + 1]
            kept.append(accepted)
        return {"prompt": prompt, "output": tokens[len(prompt) :], "accepted": kept, "smallest_margin": round(closest, 6)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target_dir", type=Path)
    parser.add_argument("draft_dir", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("output_dir", type=Path)
    args = parser.parse_args()
    for name, path in vars(args).items():
        setattr(args, name, path.absolute())
    os.chdir(args.target_dir.parent)  # the checkpoint names its target by the folder's name, and the library loads it
    tokenizer = Tokenizer.from_file(str(args.target_dir / "tokenizer.json"))
    prompts = [json.loads(line) for line in args.prompts.read_text().splitlines()]
    low, high = PROMPT_TOKENS
    fitting = [tokenizer.encode(p["text"]).ids for p in prompts if not p.get("chat") and low <= p["num_tokens"] <= high]
    chosen = fitting[:: max(1, len(fitting) // NUM_PROMPTS)][:NUM_PROMPTS]
    reference = Reference(args.target_dir, args.draft_dir)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    runs = [reference.accepted_per_step(prompt) for prompt in chosen]
    (args.output_dir / "accepted.json").write_text("[\n" + ",\n".join(map(json.dumps, runs)) + "\n]\n")
    logits = {}
    for i, prompt in enumerate(chosen[:LOGIT_PROMPTS]):
        _, aux = reference.run_target(prompt)
        logits[f"prompt_{i}"] = np.array(prompt)
        logits[f"logits_{i}"] = reference.draft_block(prompt, aux).numpy()
    np.savez_compressed(args.output_dir / "block_logits.npz", **logits)
    steps = [k for run in runs for k in run["accepted"]]
    print(f"{len(runs)} prompts, {len(steps)} steps, accept length {1 + sum(steps) / len(steps):.3f}")


if __name__ == "__main__":
    main()
