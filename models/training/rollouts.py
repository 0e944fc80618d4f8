"""The target's own text, with its hidden states, as training data for the draft.

A served draft sees only what the target writes, so most rows are greedy continuations of training prompts.
Hidden states are stored during generation, so the draft's training skips the target.

    python rollouts.py WORK_DIR TARGET_DIR      # writes rollouts.pt

With `--sampled` most continuations are drawn at temperature 1. Every row then also keeps the target's last
hidden state, which gives its whole distribution, for drafts that are trained on probabilities.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from corpus import END_OF_TEXT_ID, IM_END_ID, IM_START_ID
from draft_model import aux_from_hidden_states
from kinds import kind_of
from tokenizers import Tokenizer
from train_target import join_processes
from transformers import AutoModelForCausalLM, DynamicCache

ROW_LENGTH = 256
LONG_ROW_LENGTH = 1024
# (rows, prompt tokens, temperature); 0 is greedy.
CODE_GROUPS = [(128, 16, 0.0), (384, 64, 0.0), (128, 128, 0.0), (64, 64, 0.7)]
CHAT_ROWS, CHAT_CORPUS_ROWS, CORPUS_ROWS = 192, 64, 256
LONG_ROWS, LONG_PROMPT = 24, 832
SAMPLED_GROUPS = [(256, 64, 0.0), (384, 64, 1.0), (128, 64, 0.7), (128, 16, 1.0)]
SAMPLED_CHAT_ROWS, SAMPLED_CORPUS_ROWS = 96, 768


@torch.no_grad()
def rollout(
    model,
    prompts: torch.Tensor,
    length: int,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    keep_last: bool = False,
):
    """Continue prompts [rows, P] int64 to `length` tokens with a KV cache.

    Returns tokens [rows, length] int64, aux [rows, length, A * H] (with `keep_last` one H more, at the end:
    what the head reads) and argmax [rows, length] int64 (argmax[t] is the greedy token for position t + 1).
    Slot length - 1 of aux and argmax is zero: nothing reads it. A prompt of `length` tokens just gets its
    hidden states."""
    layer_ids = list(kind_of(model.config.to_dict()).target_layer_ids)
    if keep_last:  # transformers' last entry is the final norm's output
        layer_ids.append(model.config.num_hidden_layers - 1)
    cache, chunk = DynamicCache(config=model.config), prompts  # by config: a hybrid model has states as well
    tokens, aux, argmax = [prompts], [], []
    known = prompts.shape[1]
    if known == length:
        chunk = prompts[:, :-1]
    while True:
        out = model(input_ids=chunk, past_key_values=cache, use_cache=True, output_hidden_states=True)
        aux.append(aux_from_hidden_states(out.hidden_states, layer_ids))
        argmax.append(out.logits.argmax(-1))
        if known == length:
            break
        chunk = argmax[-1][:, -1:]
        if temperature > 0:
            probs = (out.logits[:, -1].float() / temperature).softmax(-1)
            chunk = torch.multinomial(probs, 1, generator=generator)
        tokens.append(chunk)
        known += 1
        if known == length:
            break

    def pad(pieces: list[torch.Tensor]) -> torch.Tensor:
        joined = torch.cat(pieces, dim=1)
        return torch.cat((joined, torch.zeros_like(joined[:, :1])), dim=1)

    return torch.cat(tokens, dim=1), pad(aux), pad(argmax)


def ends_after_stop(tokens: torch.Tensor, prompt_length: int) -> torch.Tensor:
    """Return end [rows], the tokens up to and with the first stop of tokens [rows, length]."""
    stops = (tokens == END_OF_TEXT_ID) | (tokens == IM_END_ID)
    stops[:, :prompt_length] = False
    first = stops.int().argmax(dim=1) + 1
    return torch.where(stops.any(dim=1), first, tokens.shape[1])


class Pool:
    """Rows of one length, with tokens, hidden states, labels and usable range."""

    def __init__(self):
        self.parts = {"tokens": [], "aux": [], "argmax": [], "first": [], "end": []}

    def add(self, rolled, first: int, prompt_length: int) -> None:
        """Add rows; tokens after a stop are void.

        first: The smallest position worth an anchor.
        """
        tokens, aux, argmax = rolled
        for name, value in zip(
            self.parts,
            (
                tokens.to(torch.int16),
                aux,
                argmax.to(torch.int16),
                torch.full((len(tokens),), first),
                ends_after_stop(tokens, prompt_length),
            ),
        ):
            self.parts[name].append(value)

    def tensors(self) -> dict:
        return {name: torch.cat(parts) for name, parts in self.parts.items()}


def code_rows(code: np.ndarray, count: int, length: int, rng) -> torch.Tensor:
    starts = rng.integers(0, len(code) - length, count)
    return torch.from_numpy(np.stack([code[s : s + length] for s in starts]).astype(np.int64))


def chat_prompts(
    chat: np.ndarray, starts: np.ndarray, header: list[int], count: int, rng
) -> list[torch.Tensor]:
    """Return ChatML prompts up to the assistant header, in unpadded batches of equal length."""
    by_length: dict[int, list[np.ndarray]] = {}
    for start in rng.permutation(starts)[: 4 * count]:
        reply = start + 1 + int(np.argmax(chat[start + 1 : start + 400] == IM_START_ID))
        prompt = chat[start : reply + len(header)]
        if 8 <= len(prompt) <= 120:
            assert prompt[-len(header) :].tolist() == header
            by_length.setdefault(len(prompt), []).append(prompt)
    groups, taken = [], 0
    for rows in sorted(by_length.values(), key=len, reverse=True):
        rows = rows[: count - taken]
        if rows:
            groups.append(torch.from_numpy(np.stack(rows).astype(np.int64)))
            taken += len(rows)
    return groups


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work_dir", type=Path)
    parser.add_argument("target_dir", type=Path)
    parser.add_argument("--scale", type=float, default=1.0, help="fraction of the rows to make")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sampled", action="store_true")
    args = parser.parse_args()
    rank, processes = join_processes()

    def scaled(count: int) -> int:
        return max(4, int(count * args.scale / processes))

    rng, generator = np.random.default_rng(args.seed + rank), torch.Generator().manual_seed(args.seed + rank)
    arrays = np.load(args.work_dir / "corpus.npz")
    code, chat, chat_starts = arrays["code"], arrays["chat"], arrays["chat_starts"]
    tokenizer = Tokenizer.from_file(str(args.work_dir / "tokenizer.json"))
    header = tokenizer.encode("<|im_start|>assistant\n").ids
    model = AutoModelForCausalLM.from_pretrained(args.target_dir, dtype=torch.bfloat16).eval()

    keep = args.sampled
    groups = SAMPLED_GROUPS if args.sampled else CODE_GROUPS
    chat_rows, corpus_rows = (
        (SAMPLED_CHAT_ROWS, SAMPLED_CORPUS_ROWS) if args.sampled else (CHAT_ROWS, CORPUS_ROWS)
    )
    began, short, long = time.time(), Pool(), Pool()

    def done(what: str) -> None:
        print(f"{what}: {time.time() - began:.0f} s", flush=True)

    for count, prompt_length, temperature in groups:
        for batch in code_rows(code, scaled(count), prompt_length, rng).split(128):
            short.add(
                rollout(model, batch, ROW_LENGTH, temperature, generator, keep), prompt_length, prompt_length
            )
        done(f"{count} x {prompt_length} at temperature {temperature}")
    for batch in chat_prompts(chat, chat_starts[:-8], header, scaled(chat_rows), rng):
        short.add(rollout(model, batch, ROW_LENGTH, keep_last=keep), batch.shape[1], batch.shape[1])
    done("chat")
    for batch in code_rows(code, scaled(corpus_rows), ROW_LENGTH, rng).split(64):
        short.add(rollout(model, batch, ROW_LENGTH, keep_last=keep), 1, ROW_LENGTH)
    starts = rng.choice(chat_starts[chat_starts < len(chat) - ROW_LENGTH], scaled(CHAT_CORPUS_ROWS))
    rows = torch.from_numpy(np.stack([chat[s : s + ROW_LENGTH] for s in starts]).astype(np.int64))
    short.add(rollout(model, rows, ROW_LENGTH, keep_last=keep), 1, ROW_LENGTH)
    done("corpus")
    for batch in code_rows(code, scaled(LONG_ROWS), LONG_PROMPT, rng).split(16):
        # Anchors from the second half of the prompt on: far positions are what is new here.
        long.add(rollout(model, batch, LONG_ROW_LENGTH, keep_last=keep), LONG_PROMPT // 2, LONG_PROMPT)
    done("long")
    pools = {"short": short.tensors(), "long": long.tensors()}
    if processes > 1:  # rank 0 collects the shares
        files = [args.work_dir / f"rollouts.{number}.pt" for number in range(processes)]
        torch.save(pools, files[rank])
        torch.distributed.barrier()
        if rank > 0:
            return
        shares = [torch.load(file) for file in files]
        pools = {
            name: {key: torch.cat([s[name][key] for s in shares]) for key in pools[name]} for name in pools
        }
        for file in files:
            file.unlink()
    torch.save(pools, args.work_dir / "rollouts.pt")
    made = pools["short"]
    print(f"{len(made['tokens'])} rows, {int((made['end'] - made['first']).sum())} usable anchors")


if __name__ == "__main__":
    main()
