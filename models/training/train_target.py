"""Train a tiny target that writes Python.

A deep and thin Qwen3, or a hybrid Qwen3.5 (kinds.py).

    python train_target.py WORK_DIR OUTPUT_DIR --steps 1000 [--kind qwen3_5]
"""

import argparse
import json
import math
import os
import shutil
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from corpus import END_OF_TEXT_ID, IM_END_ID
from kinds import KINDS, Kind
from muon import Muon
from pass_dtype import PASS_DTYPE
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

TOKENS_PER_STEP = 4096
CHAT_SHARE = 1 / 8  # rows of a short batch that are ChatML documents
LONG_EVERY = 10  # every tenth batch has rows of 1024 or 2048 tokens


def new_target(kind: Kind):
    """Return a float32 target with random weights."""
    fields = {k: v for k, v in kind.target_config.items() if k not in ("architectures", "model_type")}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind.target_config["model_type"], **fields))
    for name, parameter in model.named_parameters():  # start as the identity: safe with large Muon steps
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            torch.nn.init.zeros_(parameter)
    return model


@torch.no_grad()
def borrow_embedding(model, directory: Path, std: float = 0.04) -> None:
    """Start from another target's embedding, reduced to this model's width.

    Both use the same tokens. The embedding is centred, reduced by SVD, turned at random, so that no
    coordinate stands out, and scaled down: the layers start as the identity, and with large tied rows every
    token would predict itself.
    """
    theirs = load_file(str(directory / "model.safetensors"))["model.embed_tokens.weight"].float()
    ours = model.get_input_embeddings().weight
    left, values, _ = torch.linalg.svd(theirs - theirs.mean(0), full_matrices=False)
    turned = (left * values)[:, : ours.shape[1]] @ torch.linalg.qr(torch.randn(2 * [ours.shape[1]]))[0]
    ours.copy_(turned * (std / turned.std()))


def write_checkpoint(
    directory: Path, config: dict, tensors: dict, extra_files: list[Path] = (), extra_json: dict | None = None
) -> None:
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


def save_target(model, kind: Kind, work_dir: Path, directory: Path) -> None:
    tensors = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}  # tied
    write_checkpoint(
        directory,
        kind.target_config,
        tensors,
        [work_dir / "tokenizer.json", work_dir / "tokenizer_config.json"],
        {
            "generation_config.json": {
                "eos_token_id": [END_OF_TEXT_ID, IM_END_ID],
                "pad_token_id": END_OF_TEXT_ID,
                "do_sample": False,
            }
        },
    )


class Batches:
    """Training rows; every code token is seen once per epoch, in random order."""

    def __init__(self, arrays, seed: int = 0, tokens: int = TOKENS_PER_STEP):
        self.tokens = tokens
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
            rows.append(self.code[start : start + length])
        return rows

    def _chat_rows(self, count: int, length: int) -> list[np.ndarray]:
        """Return rows that begin with a whole conversation, as when served."""
        usable = self.chat_starts[self.chat_starts < len(self.chat) - length]
        return [self.chat[s : s + length] for s in self.rng.choice(usable, count)]

    def draw(self, step: int) -> torch.Tensor:
        """Return ids [rows, length] int64 with rows * length == tokens."""
        if step % LONG_EVERY == LONG_EVERY - 1:
            length = (1024, 2048)[step // LONG_EVERY % 2]
            rows = self._code_rows(self.tokens // length, length)
        else:
            length = 256
            count = self.tokens // length
            chats = round(count * CHAT_SHARE)
            rows = self._code_rows(count - chats, length) + self._chat_rows(chats, length)
        return torch.from_numpy(np.stack(rows).astype(np.int64))


class MasterWeights:
    """Weights in `PASS_DTYPE` for the passes, with float32 copies for the optimizers.

    Muon for the matrices, AdamW for embedding and norms. Twice as fast here as autocast over float32 weights,
    because activations stay bfloat16 as well.
    """

    def __init__(self, model: torch.nn.Module, muon_lr: float, adam_lr: float):
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self.pairs = [(p, p.detach().float().clone()) for _, p in named]
        # A projection to a few scalars per token (GatedDeltaNet's gates) is no matrix to orthogonalise.
        is_matrix = [
            p.ndim == 2 and min(p.shape) >= 16 and "embed" not in n and "codebook" not in n for n, p in named
        ]
        masters = [m for _, m in self.pairs]
        self.optimizers = [
            Muon([m for m, use in zip(masters, is_matrix) if use], lr=muon_lr),
            torch.optim.AdamW(
                [m for m, use in zip(masters, is_matrix) if not use],
                lr=adam_lr,
                betas=(0.9, 0.95),
                weight_decay=0.0,
            ),
        ]
        self.peaks = (muon_lr, adam_lr)
        for parameter in model.parameters():  # not the buffers: RoPE frequencies need float32
            parameter.data = parameter.data.to(PASS_DTYPE)

    def step(self, scale: float) -> None:
        for parameter, master in self.pairs:
            master.grad = parameter.grad.float()
            parameter.grad = None
        if torch.distributed.is_initialized():
            self._average_gradients()
        for optimizer, peak in zip(self.optimizers, self.peaks):
            optimizer.param_groups[0]["lr"] = peak * scale
            optimizer.step()
        with torch.no_grad():
            for parameter, master in self.pairs:
                parameter.copy_(master)

    def _average_gradients(self) -> None:
        """Average over all processes, in one message."""
        flat = torch.cat([master.grad.flatten() for _, master in self.pairs])
        torch.distributed.all_reduce(flat)
        flat /= torch.distributed.get_world_size()
        for (_, master), mean in zip(self.pairs, flat.split([m.numel() for _, m in self.pairs])):
            master.grad = mean.view_as(master)


def join_processes() -> tuple[int, int]:
    """Connect the processes of `torchrun`; return (rank, count), (0, 1) without it."""
    rank, processes = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if processes > 1:
        torch.distributed.init_process_group("gloo")
    return rank, processes


def seconds_since(began: float) -> float:
    """Return the seconds of the slowest process, so that all agree."""
    seconds = torch.tensor(time.time() - began, dtype=torch.float64)
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(seconds, torch.distributed.ReduceOp.MAX)
    return seconds.item()


def learning_rate_scale(step: int, done: float, warmup: int) -> float:
    """Return the learning rate's factor: warm-up, flat, then linear to zero.

    The last 60 % fall. `done` is the fraction of the training that is over.
    """
    return min(1.0, (step + 1) / warmup, (1 - done) / 0.6)


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return nats per token of logits [rows, length, vocab] for ids [rows, length]."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


@torch.no_grad()
def heldout_loss(model, heldout: np.ndarray, length: int = 512, rows: int = 64) -> float:
    starts = np.linspace(0, len(heldout) - length, rows).astype(int)
    ids = torch.from_numpy(np.stack([heldout[s : s + length] for s in starts]).astype(np.int64))
    with torch.compiler.set_stance("force_eager"):
        return float(
            np.mean([next_token_loss(model(input_ids=b, use_cache=False).logits, b) for b in ids.split(8)])
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work_dir", type=Path)
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("--kind", choices=KINDS, default="qwen3")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=math.inf, help="end earlier, by this clock")
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=0.004)
    parser.add_argument("--compile", action="store_true", help="needs a C++ compiler; 1.4x faster")
    parser.add_argument("--embedding-from", type=Path, help="start from this target's embedding")
    parser.add_argument("--save-at", type=int, nargs="*", default=[], help="early checkpoints")
    args = parser.parse_args()

    torch.manual_seed(0)
    arrays = np.load(args.work_dir / "corpus.npz")
    rank, processes = join_processes()
    batches = Batches(arrays, seed=rank, tokens=TOKENS_PER_STEP // processes)
    kind = KINDS[args.kind]
    model = new_target(kind)
    if args.embedding_from:
        borrow_embedding(model, args.embedding_from)
    weights = MasterWeights(model, args.muon_lr, args.adam_lr)
    if args.compile:  # layer by layer: layers of one kind share their code
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    began, average, log, step, done = time.time(), None, [], 0, 0.0
    while done < 1:
        ids = batches.draw(step)
        # Only the common shape is compiled: each further shape costs most of a minute.
        with torch.compiler.set_stance("default" if ids.shape[1] == 256 else "force_eager"):
            loss = next_token_loss(model(input_ids=ids, use_cache=False).logits, ids)
        loss.backward()
        weights.step(learning_rate_scale(step, done, warmup=30))
        average = loss.item() if average is None else 0.95 * average + 0.05 * loss.item()
        seconds, step = seconds_since(began), step + 1
        done = max(step / args.steps, seconds / (60 * args.minutes))
        if rank > 0:
            continue
        if step % 10 == 0:
            print(f"step {step} loss {average:.3f} seconds {seconds:.0f}", flush=True)
        if step in args.save_at:
            save_target(model, kind, args.work_dir, args.output_dir)
        if step % 250 == 0 or done >= 1:
            log.append(
                {
                    "step": step,
                    "train_loss": round(average, 3),
                    "heldout_loss": round(heldout_loss(model, arrays["heldout"]), 3),
                    "seconds": round(seconds),
                }
            )
            print(json.dumps(log[-1]), flush=True)
    if rank > 0:
        return
    save_target(model, kind, args.work_dir, args.output_dir)
    (args.work_dir / "train_target.json").write_text(
        json.dumps(
            {
                "kind": kind.name,
                "steps": step,
                "tokens": step * TOKENS_PER_STEP,
                "embedding_from": args.embedding_from and args.embedding_from.name,
                "log": log,
            },
            indent=2,
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
