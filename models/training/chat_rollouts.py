"""Answers of a Llama target to prompts, with hidden states, as training data for a draft.

One process with one thread and continuous batching: the slot of a finished row takes the next prompt at once.
Linear weights are packed for oneDNN once. Rows are written in shards, and a second run continues with the
prompts that are in no shard yet. Several processes can share the work with `--part`.

    python chat_rollouts.py TARGET_DIR PROMPTS.jsonl SHARD_DIR [--part 0/2]

Shapes: B slots, S positions of a slot, N tokens of one forward pass, D head size, H hidden size.
"""

import argparse
import hashlib
import json
import math
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from pass_dtype import PASS_DTYPE
from safetensors.torch import load_file
from tokenizers import Tokenizer

MAX_NEW = {"complete": 200, "edit": 320, "turns": 160}
DEFAULT_MAX_NEW = 240
GREEDY_SHARE = 0.6  # of the prompts; the others are sampled at 0.6 to 1.0
# The chat template adds this system prompt to conversations without one.
SYSTEM_PROMPT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


def spread_layers(num_layers: int, count: int = 5) -> list[int]:
    """Return evenly spread layers whose outputs a draft reads.

    From layer 1 to the third from the end, as published DFlash drafts do.
    """
    return [round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count)]


class PackedLinear:
    """A bias-free linear layer in `PASS_DTYPE`. A bfloat16 weight is packed for oneDNN."""

    def __init__(self, *weights: torch.Tensor):
        self.weight = torch.cat(weights).to(PASS_DTYPE).contiguous()
        self.is_packed = PASS_DTYPE == torch.bfloat16
        if self.is_packed:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight, 64)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, None, "none", [], "")
        return F.linear(x, self.weight)


class BatchedLlama:
    """A Llama target with a static KV cache and a buffer of hidden states.

    Keys and values: [B, kv heads, S, D] per layer.
    """

    def __init__(self, directory: Path, slots: int, length: int):
        config = json.loads((directory / "config.json").read_text())
        weights = load_file(str(directory / "model.safetensors"))
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.num_layers, self.hidden = config["num_hidden_layers"], config["hidden_size"]
        self.head_dim, self.eps = config["head_dim"], config["rms_norm_eps"]
        theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
        self.embedding = weights["model.embed_tokens.weight"].to(PASS_DTYPE)
        self.head, self.norm = PackedLinear(self.embedding), weights["model.norm.weight"].to(PASS_DTYPE)
        self.layers = [self._layer(weights, number) for number in range(self.num_layers)]
        self.captured = spread_layers(self.num_layers)
        shape = (self.num_layers, slots, self.kv_heads, length, self.head_dim)
        self.keys, self.values = (
            torch.zeros(shape, dtype=PASS_DTYPE),
            torch.zeros(shape, dtype=PASS_DTYPE),
        )
        self.states = torch.zeros(slots, length, (len(self.captured) + 1) * self.hidden, dtype=torch.bfloat16)
        inverse = theta ** (-torch.arange(0, self.head_dim, 2).float() / self.head_dim)
        angles = torch.arange(length).float()[:, None] * torch.cat((inverse, inverse))
        self.cos, self.sin = angles.cos().to(PASS_DTYPE), angles.sin().to(PASS_DTYPE)

    @staticmethod
    def _layer(weights: dict, number: int) -> tuple:
        """Return the norms and packed projections of one layer, in the order of their use."""

        def get(name: str) -> torch.Tensor:
            return weights[f"model.layers.{number}.{name}.weight"].to(PASS_DTYPE)

        return (
            get("input_layernorm"),
            PackedLinear(*(get(f"self_attn.{x}_proj") for x in "qkv")),
            PackedLinear(get("self_attn.o_proj")),
            get("post_attention_layernorm"),
            PackedLinear(get("mlp.gate_proj"), get("mlp.up_proj")),
            PackedLinear(get("mlp.down_proj")),
        )

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return weight * F.rms_norm(x.float(), (self.hidden,), eps=self.eps).to(PASS_DTYPE)

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Apply RoPE to x [N, heads, D] at positions [N]."""
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        return x * self.cos[positions][:, None] + turned * self.sin[positions][:, None]

    def forward(self, tokens, slots, positions, chunk: bool) -> torch.Tensor:
        """Return the normed hidden states [N, H] of tokens [N].

        `chunk`: all tokens follow each other in one slot; otherwise each is the newest token of its slot.
        """
        n, end = len(tokens), int(positions.max()) + 1
        x = F.embedding(tokens, self.embedding)
        mask = torch.arange(end) <= positions[:, None] if chunk else None
        slot, ends = int(slots[0]), (positions + 1).tolist()
        kept = []
        for number, (norm1, qkv, out, norm2, gate_up, down) in enumerate(self.layers):
            heads = qkv(self._norm(x, norm1)).unflatten(-1, (-1, self.head_dim))
            query, key, value = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
            query, key = self._rotate(query, positions), self._rotate(key, positions)
            keys, values = self.keys[number], self.values[number]
            keys[slots, :, positions], values[slots, :, positions] = key, value
            if chunk:
                attended = F.scaled_dot_product_attention(
                    query.transpose(0, 1)[None],
                    keys[slot, None, :, :end],
                    values[slot, None, :, :end],
                    attn_mask=mask,
                    enable_gqa=True,
                )[0].transpose(0, 1)
            else:  # slot by slot: a batch would read every slot up to the longest one's end
                grouped = query.unflatten(1, (self.kv_heads, -1))  # the query heads of one KV head
                attended = torch.cat(
                    [
                        F.scaled_dot_product_attention(
                            grouped[s : s + 1], keys[s : s + 1, :, :e], values[s : s + 1, :, :e]
                        )
                        for s, e in enumerate(ends)
                    ]
                )
            x = x + out(attended.reshape(n, -1))
            gate, up = gate_up(self._norm(x, norm2)).chunk(2, dim=-1)
            x = x + down(F.silu(gate) * up)
            if number in self.captured:
                kept.append(x)
        x = self._norm(x, self.norm)
        self.states[slots, positions] = torch.cat((*kept, x), dim=-1).to(self.states.dtype)
        return x


@dataclass
class Row:
    """One conversation: its tokens, and which of them the target wrote."""

    name: str
    kind: str
    temperature: float
    tokens: list[int]
    turns: deque
    written: list[bool] = field(default_factory=list)
    answered: int = 0  # tokens of the present answer

    def add(self, tokens: list[int], written: bool) -> None:
        self.tokens += tokens
        self.written += [written] * len(tokens)


def is_looping(tokens: list[int], window: int = 48, longest: int = 24) -> bool:
    """Return whether the newest `window` tokens repeat with a period of at most `longest`."""
    tail = tokens[-window:]
    return any(tail[period:] == tail[:-period] for period in range(1, longest + 1))


def read_prompts(
    path: Path,
    tokenizer: Tokenizer,
    done: set[str],
    part: tuple[int, int],
    greedy_share: float = GREEDY_SHARE,
    limit: int | None = None,
) -> deque[Row]:
    """Return the prompts that are still to be answered, tokenized."""
    rows = deque()
    for number, line in enumerate(path.read_text().splitlines()[:limit]):
        prompt = json.loads(line)
        if number % part[1] != part[0] or prompt["id"] in done:
            continue
        digest = int.from_bytes(hashlib.sha256(prompt["id"].encode()).digest()[:4], "big") / 2**32
        temperature = 0.0 if digest < greedy_share else 0.6 + digest - greedy_share
        asks = deque(m["content"] for m in prompt.get("messages", ()))
        text = prompt.get("text") or system_turn() + user_turn(asks.popleft())
        row = Row(prompt["id"], prompt["kind"], round(temperature, 2), [], asks)
        row.add(tokenizer.encode(text, add_special_tokens=False).ids, False)
        if len(row.tokens) <= 420:
            rows.append(row)
    return rows


def system_turn() -> str:
    return f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n"


def user_turn(content: str) -> str:
    return f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"


def shard_paths(directory: Path) -> list[Path]:
    """List the shards of a folder, without the trainer's files of best tokens."""
    return sorted(path for path in directory.glob("*.pt") if not path.name.endswith(".argmax.pt"))


class Shards:
    """Finished rows, written in files of about `size` written tokens."""

    def __init__(self, directory: Path, prefix: str, size: int):
        self.directory, self.prefix, self.size = directory, prefix, size
        directory.mkdir(parents=True, exist_ok=True)
        self.done, self.total = set(), 0
        for path in directory.glob("*.json"):
            summary = json.loads(path.read_text())
            self.done.update(summary["names"])
            self.total += summary["written"]
        self.rows, self.states, self.count = [], [], 0

    def add(self, row: Row, states: torch.Tensor) -> None:
        self.rows.append(row)
        self.states.append(states.clone())
        self.count += sum(row.written)
        if self.count >= self.size:
            self.write()

    def write(self) -> None:
        if not self.rows:
            return
        number = len(list(self.directory.glob(f"{self.prefix}-*.json")))
        path = self.directory / f"{self.prefix}-{number:04d}.pt"
        torch.save(
            {
                "lengths": torch.tensor([len(r.tokens) for r in self.rows]),
                "temperatures": torch.tensor([r.temperature for r in self.rows]),
                "tokens": torch.cat([torch.tensor(r.tokens, dtype=torch.int32) for r in self.rows]),
                "written": torch.cat([torch.tensor(r.written) for r in self.rows]),
                "states": torch.cat(self.states),
            },
            path.with_suffix(".partial"),
        )
        path.with_suffix(".partial").rename(path)
        summary = {
            "names": [r.name for r in self.rows],
            "written": self.count,
            "tokens": sum(len(r.tokens) for r in self.rows),
        }
        path.with_suffix(".json").write_text(json.dumps(summary))
        self.total += self.count
        self.rows, self.states, self.count = [], [], 0


class Generator:
    """Slots with rows in progress."""

    def __init__(self, model: BatchedLlama, tokenizer: Tokenizer, shards: Shards):
        self.model, self.tokenizer, self.shards = model, tokenizer, shards
        slots, self.length = model.states.shape[:2]
        self.stops = {tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")}
        self.rows: list[Row | None] = [None] * slots
        self.pending = torch.zeros(slots, dtype=torch.int64)  # token to be fed next
        self.random = torch.Generator().manual_seed(int(time.time()))
        self.made = self.read = 0

    def _choose(self, hidden: torch.Tensor, rows: list[Row]) -> list[int]:
        logits = self.model.head(hidden).float()
        chosen = logits.argmax(-1)
        warm = [i for i, row in enumerate(rows) if row.temperature > 0]
        if warm:
            scale = torch.tensor([rows[i].temperature for i in warm])[:, None]
            chosen[warm] = torch.multinomial((logits[warm] / scale).softmax(-1), 1, generator=self.random)[
                :, 0
            ]
        return chosen.tolist()

    def _feed(self, slot: int, tokens: list[int]) -> None:
        """Read tokens into a slot and take the first token of the answer."""
        row = self.rows[slot]
        begin = len(row.tokens) - len(tokens)
        positions = torch.arange(begin, len(row.tokens))
        hidden = self.model.forward(
            torch.tensor(tokens), torch.full_like(positions, slot), positions, chunk=True
        )
        self.read += len(tokens)
        row.answered = 0
        self._take(slot, self._choose(hidden[-1:], [row])[0])

    def _take(self, slot: int, token: int) -> None:
        """Append a token; at the end of an answer ask the next question or finish the row."""
        row = self.rows[slot]
        row.add([token], True)
        row.answered += 1
        self.made += 1
        self.pending[slot] = token
        limit = MAX_NEW.get(row.kind, DEFAULT_MAX_NEW)
        looping = row.answered % 16 == 0 and row.answered >= 64 and is_looping(row.tokens)
        stopped = token in self.stops
        if not (stopped or looping or row.answered >= limit or len(row.tokens) >= self.length):
            return
        if stopped and row.turns and len(row.tokens) < self.length - 240:
            text = "\n" + user_turn(row.turns.popleft())
            more = self.tokenizer.encode(text, add_special_tokens=False).ids
            row.add(more, False)
            self._feed(slot, [token, *more])
            return
        self.shards.add(row, self.model.states[slot, : len(row.tokens)])  # the last token's states are void
        self.rows[slot] = None

    def run(self, waiting: deque[Row], tokens: float) -> None:
        """Answer the prompts, until the folder holds `tokens` written tokens."""
        began, reported = time.time(), 0.0
        while (waiting or any(self.rows)) and self.shards.total < tokens:
            for slot in range(len(self.rows)):
                while self.rows[slot] is None and waiting:
                    self.rows[slot] = waiting.popleft()
                    self._feed(slot, self.rows[slot].tokens)
            busy = [slot for slot, row in enumerate(self.rows) if row is not None]
            if not busy:
                continue
            # Free slots run along at position 0, so that the cache is read without a copy.
            positions = torch.tensor([len(row.tokens) - 1 if row else 0 for row in self.rows])
            hidden = self.model.forward(self.pending, torch.arange(len(self.rows)), positions, chunk=False)
            for slot, token in zip(busy, self._choose(hidden[busy], [self.rows[slot] for slot in busy])):
                self._take(slot, token)
            seconds = time.time() - began
            if seconds - reported > 60:
                reported = seconds
                print(
                    f"{seconds:.0f} s: {self.made} written, {self.read} read, {len(waiting)} waiting",
                    flush=True,
                )
        self.shards.write()


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target_dir", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("shard_dir", type=Path)
    parser.add_argument("--part", default="0/1", help="answer every N-th prompt, from the I-th: I/N")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--length", type=int, default=768, help="tokens of a row, prompt included")
    parser.add_argument("--shard-tokens", type=int, default=20000)
    parser.add_argument("--greedy-share", type=float, default=GREEDY_SHARE)
    parser.add_argument("--limit", type=int, help="read only the first prompts of the file")
    parser.add_argument("--tokens", type=float, default=math.inf, help="end when the shards hold so many")
    args = parser.parse_args()
    torch.set_num_threads(1)
    index, parts = map(int, args.part.split("/"))
    tokenizer = Tokenizer.from_file(str(args.target_dir / "tokenizer.json"))
    shards = Shards(args.shard_dir, f"part{index}of{parts}", args.shard_tokens)
    waiting = read_prompts(
        args.prompts, tokenizer, shards.done, (index, parts), args.greedy_share, args.limit
    )
    print(f"{len(waiting)} prompts to answer, {len(shards.done)} done", flush=True)
    model = BatchedLlama(args.target_dir, args.slots, args.length)
    Generator(model, tokenizer, shards).run(waiting, args.tokens)


if __name__ == "__main__":
    main()
