"""Train the tiny target: a deep and thin Qwen3 that writes Python.

Twelve layers for seven million parameters: on a CPU the cost of a layer at
serving time is launch overhead, so depth is what makes the target slow
compared with its draft, as it is for a real pair.

    python train_target.py WORK_DIR OUTPUT_DIR --steps 1000
"""

import argparse
import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from corpus import END_OF_TEXT_ID, IM_END_ID, VOCAB_SIZE

TOKENS_PER_STEP = 4096
CHAT_SHARE = 1 / 8  # rows of a short batch that are ChatML documents
LONG_EVERY = 10  # every tenth batch has rows of 1024 or 2048 tokens

TARGET_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "use_cache": True,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 12,
    "layer_types": ["full_attention"] * 12,
    "bos_token_id": None,
    "eos_token_id": END_OF_TEXT_ID,
    "pad_token_id": END_OF_TEXT_ID,
}


def new_target() -> Qwen3ForCausalLM:
    """A target with random weights; float32."""
    fields = {k: v for k, v in TARGET_CONFIG.items() if k not in ("architectures", "model_type")}
    model = Qwen3ForCausalLM(Qwen3Config(**fields))
    for layer in model.model.layers:  # start as the identity: safe with large Muon steps
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


def write_checkpoint(directory: Path, config: dict, tensors: dict, extra_files: list[Path] = (),
                     extra_json: dict | None = None) -> None:
    """Replace `directory` in one rename, so that a reader never sees half a model.

    Files that are in the old directory and not in the new one (model card) stay.
    """
    temporary = directory.with_name(directory.name + ".partial")
    shutil.rmtree(temporary, ignore_errors=True)
    if directory.exists():
        shutil.copytree(directory, temporary)
    temporary.mkdir(parents=True, exist_ok=True)
    # Both spellings of the dtype: transformers 5 renamed it, other readers did not.
    config = config | {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
    (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name, content in (extra_json or {}).items():
        (temporary / name).write_text(json.dumps(content, indent=2) + "\n")
    for path in extra_files:
        shutil.copy(path, temporary / path.name)
    tensors = {k: v.detach().to(torch.bfloat16).contiguous() for k, v in tensors.items()}
    save_file(tensors, str(temporary / "model.safetensors"), metadata={"format": "pt"})
    (temporary / "model.safetensors").chmod(0o644)
    old = directory.with_name(directory.name + ".old")
    if directory.exists():
        os.rename(directory, old)
    os.rename(temporary, directory)
    shutil.rmtree(old, ignore_errors=True)


def save_target(model: Qwen3ForCausalLM, work_dir: Path, directory: Path) -> None:
    tensors = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}  # tied
    write_checkpoint(
        directory, TARGET_CONFIG, tensors,
        [work_dir / "tokenizer.json", work_dir / "tokenizer_config.json"],
        {"generation_config.json": {"eos_token_id": [END_OF_TEXT_ID, IM_END_ID],
                                    "pad_token_id": END_OF_TEXT_ID, "do_sample": False}})


class Batches:
    """Draws training rows; every code token is seen once per epoch, in random order."""

    def __init__(self, arrays, seed: int = 0):
        self.code, self.chat, self.chat_starts = arrays["code"], arrays["chat"], arrays["chat_starts"]
        self.rng = np.random.default_rng(seed)
        self.pending: dict[int, list[int]] = {}

    def _code_rows(self, count: int, length: int) -> list[np.ndarray]:
        rows = []
        for _ in range(count):
            if not self.pending.get(length):
                phase = self.rng.integers(length)
                starts = np.arange(phase, len(self.code) - length, length)
                self.pending[length] = list(self.rng.permutation(starts))
            start = self.pending[length].pop()
            rows.append(self.code[start:start + length])
        return rows

    def _chat_rows(self, count: int, length: int) -> list[np.ndarray]:
        """Rows that begin with a whole conversation, as they do at serving time."""
        usable = self.chat_starts[self.chat_starts < len(self.chat) - length]
        return [self.chat[s:s + length] for s in self.rng.choice(usable, count)]

    def draw(self, step: int) -> torch.Tensor:
        """ids [rows, length] int64 with rows * length == TOKENS_PER_STEP."""
        if step % LONG_EVERY == LONG_EVERY - 1:
            length = (1024, 2048)[step // LONG_EVERY % 2]
            rows = self._code_rows(TOKENS_PER_STEP // length, length)
        else:
            length = 256
            count = TOKENS_PER_STEP // length
            chats = round(count * CHAT_SHARE)
            rows = self._code_rows(count - chats, length) + self._chat_rows(chats, length)
        return torch.from_numpy(np.stack(rows).astype(np.int64))


class MasterWeights:
    """bfloat16 weights for the passes, float32 copies for the optimizers.

    Muon for the matrices, AdamW for embedding and norms. Twice as fast here as
    autocast over float32 weights, because activations stay bfloat16 as well.
    """

    def __init__(self, model: torch.nn.Module, muon_lr: float, adam_lr: float):
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self.pairs = [(p, p.detach().float().clone()) for _, p in named]
        is_matrix = [p.ndim == 2 and "embed" not in n for n, p in named]
        masters = [m for _, m in self.pairs]
        self.optimizers = [
            torch.optim.Muon([m for m, use in zip(masters, is_matrix) if use],
                             lr=muon_lr, momentum=0.95, weight_decay=0.01),
            torch.optim.AdamW([m for m, use in zip(masters, is_matrix) if not use],
                              lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0)]
        self.peaks = (muon_lr, adam_lr)
        for parameter in model.parameters():  # not the buffers: RoPE frequencies need float32
            parameter.data = parameter.data.to(torch.bfloat16)

    def step(self, scale: float) -> None:
        for parameter, master in self.pairs:
            master.grad = parameter.grad.float()
            parameter.grad = None
        for optimizer, peak in zip(self.optimizers, self.peaks):
            optimizer.param_groups[0]["lr"] = peak * scale
            optimizer.step()
        with torch.no_grad():
            for parameter, master in self.pairs:
                parameter.copy_(master)


def learning_rate_scale(step: int, steps: int, warmup: int) -> float:
    """Linear warm-up, flat, then linear to zero over the last 60 %."""
    return min(1.0, (step + 1) / warmup, (steps - step) / (0.6 * steps))


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """logits [rows, length, vocab], ids [rows, length] -> scalar, nats per token."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


@torch.no_grad()
def heldout_loss(model, heldout: np.ndarray, length: int = 512, rows: int = 64) -> float:
    starts = np.linspace(0, len(heldout) - length, rows).astype(int)
    ids = torch.from_numpy(np.stack([heldout[s:s + length] for s in starts]).astype(np.int64))
    return float(np.mean([next_token_loss(model(input_ids=b, use_cache=False).logits, b)
                          for b in ids.split(8)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work_dir", type=Path)
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=0.004)
    parser.add_argument("--compile", action="store_true", help="needs a C++ compiler; 1.4x faster")
    parser.add_argument("--save-at", type=int, nargs="*", default=[], help="early checkpoints")
    args = parser.parse_args()

    torch.manual_seed(0)
    arrays = np.load(args.work_dir / "corpus.npz")
    batches = Batches(arrays)
    model = new_target()
    weights = MasterWeights(model, args.muon_lr, args.adam_lr)
    # Only the common shape is compiled: each further shape costs most of a minute.
    short_model = torch.compile(model, dynamic=False) if args.compile else model
    began, average, log = time.time(), None, []
    for step in range(args.steps):
        ids = batches.draw(step)
        forward = short_model if ids.shape[1] == 256 else model
        loss = next_token_loss(forward(input_ids=ids, use_cache=False).logits, ids)
        loss.backward()
        weights.step(learning_rate_scale(step, args.steps, warmup=30))
        average = loss.item() if average is None else 0.95 * average + 0.05 * loss.item()
        if step % 10 == 0:
            print(f"step {step} loss {average:.3f} seconds {time.time() - began:.0f}", flush=True)
        if step + 1 in args.save_at:
            save_target(model, args.work_dir, args.output_dir)
        if (step + 1) % 250 == 0 or step + 1 == args.steps:
            log.append({"step": step + 1, "train_loss": round(average, 3),
                        "heldout_loss": round(heldout_loss(model, arrays["heldout"]), 3),
                        "seconds": round(time.time() - began)})
            print(json.dumps(log[-1]), flush=True)
    save_target(model, args.work_dir, args.output_dir)
    (args.work_dir / "train_target.json").write_text(json.dumps(
        {"steps": args.steps, "tokens": args.steps * TOKENS_PER_STEP, "log": log}, indent=2) + "\n")


if __name__ == "__main__":
    main()
