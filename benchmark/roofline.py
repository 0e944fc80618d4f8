"""Lower bound of a cycle's time, from the bytes and FLOPs of draft, verify and commit.

    python benchmark/roofline.py        # prints the tables of ROOFLINE.md

Counted: every weight once per forward, KV of the context read once, KV written, the target's logits written
and read once in bf16 (sampling needs them), captured hidden states written and read once. Not counted:
activations inside a forward and the draft's logits, which fit in the L2 cache or can be reduced in the kernel
that computes them. A phase takes at least as long as the slower of memory and arithmetic, each at its peak
and perfectly overlapped. Phases depend on each other, so their times add up.
"""

from dataclasses import dataclass

from gpu.shapes import QWEN3_8B, Model, Pair

BF16 = 2  # bytes
BATCHES = (1, 4, 16, 48)
CONTEXT = 1024
ACCEPT_LENGTH = 6.5


@dataclass(frozen=True)
class Gpu:
    """Peaks from NVIDIA's data sheets: dense bf16 FLOP/s and memory bytes/s."""

    name: str
    flops: float
    bandwidth: float


H200 = Gpu("H200", 989e12, 4.8e12)
H100 = Gpu("H100 SXM", 989e12, 3.35e12)


@dataclass(frozen=True)
class Work:
    bytes: float
    flops: float

    def seconds(self, gpu: Gpu) -> float:
        return max(self.bytes / gpu.bandwidth, self.flops / gpu.flops)

    def bound(self, gpu: Gpu) -> str:
        return "memory" if self.bytes / gpu.bandwidth > self.flops / gpu.flops else "compute"


def layer_parameters(m: Model) -> int:
    """Count the parameters of all layers: Q and O, K and V, and the three matrices of the MLP."""
    q_and_o = 2 * m.hidden_size * m.num_attention_heads * m.head_dim
    k_and_v = 2 * m.hidden_size * m.num_key_value_heads * m.head_dim
    return m.num_hidden_layers * (q_and_o + k_and_v + 3 * m.hidden_size * m.intermediate_size)


def head_parameters(m: Model) -> int:
    return m.vocab_size * m.hidden_size


def kv_bytes(m: Model) -> int:
    """Count the bytes of one token's KV in all layers."""
    return m.num_hidden_layers * 2 * m.num_key_value_heads * m.head_dim * BF16


def _forward(m: Model, batch: int, width: int, context: float, attended: float, head_rows: int) -> Work:
    """Count `width` tokens per request, each attending to `attended`."""
    rows = batch * width
    weights = layer_parameters(m) + head_parameters(m)
    attention = 4 * m.num_hidden_layers * m.num_attention_heads * m.head_dim * attended
    return Work(
        bytes=BF16 * weights + kv_bytes(m) * (batch * context + rows),
        flops=rows * (2 * layer_parameters(m) + attention) + head_rows * 2 * head_parameters(m),
    )


def no_speculation(pair: Pair, batch: int, context: float) -> Work:
    """Count a plain decoding step."""
    forward = _forward(pair.target, batch, 1, context, context + 1, batch)
    return Work(forward.bytes + 2 * BF16 * batch * pair.target.vocab_size, forward.flops)


def draft(pair: Pair, batch: int, context: float) -> Work:
    """Count the non-causal block through the draft and, without the anchor, the target's head."""
    block = pair.block_size
    return _forward(pair.draft, batch, block, context, context + block, batch * (block - 1))


def verify(pair: Pair, batch: int, context: float) -> Work:
    """Count the causal block through the target."""
    rows = batch * pair.block_size
    attended = context + (pair.block_size + 1) / 2
    forward = _forward(pair.target, batch, pair.block_size, context, attended, rows)
    logits = 2 * BF16 * rows * pair.target.vocab_size
    aux_hidden = BF16 * rows * len(pair.target_layer_ids) * pair.target.hidden_size
    return Work(forward.bytes + logits + aux_hidden, forward.flops)


def commit(pair: Pair, batch: int, context: float) -> Work:
    """Count the way of captured states to the draft's KV: `fc`, then K and V of all layers.

    All rows count: the verify graph ends with this step, and only the device knows how many rows are valid.
    """
    rows, hidden = batch * pair.block_size, pair.draft.hidden_size
    aux = len(pair.target_layer_ids) * pair.target.hidden_size
    parameters = aux * hidden + hidden * kv_bytes(pair.draft) // BF16
    written = kv_bytes(pair.draft) * rows
    return Work(BF16 * (parameters + rows * aux) + written, 2.0 * parameters * rows)


PHASES = (draft, verify, commit)


def cycle_seconds(pair: Pair, gpu: Gpu, batch: int, context: float) -> float:
    return sum(phase(pair, batch, context).seconds(gpu) for phase in PHASES)


# Besides GEMMs and attention, a cycle has three small kernels (python/sglang/kernels/ops/speculative).
def prepare_block_bytes(pair: Pair, batch: int) -> int:
    return batch * (24 + 28 * pair.block_size)


def write_context_kv_bytes(pair: Pair, batch: int) -> int:
    """Count all rows: K and V read and written, a float32 cosine row, position and slot."""
    row = 2 * kv_bytes(pair.draft) + 4 * pair.draft.head_dim + 16
    return batch * pair.block_size * row + BF16 * pair.draft.num_hidden_layers * pair.draft.head_dim


def accept_blocks_bytes(pair: Pair, batch: int) -> int:
    return batch * (28 * pair.block_size + 24)


SMALL_KERNELS = (
    ("`prepare_block`", "bs (24 + 28 B)", prepare_block_bytes),
    ("`write_context_kv`", "rows (2 KV + 4 head_dim + 16) + 2 layers head_dim", write_context_kv_bytes),
    ("`accept_blocks`", "bs (28 B + 24)", accept_blocks_bytes),
)


# --speculative-copy-ahead adds five launches: lookup, choice, merged blocks, text written, a copy to the
# host.
LAUNCHES = 5
TEXTS = ((1, 1024), (1, 32_768), (48, 1024), (48, 32_768))
LAUNCH_S = 5e-6  # of a small kernel, an upper bound


def copy_ahead_bytes(pair: Pair, batch: int, context: int) -> int:
    """Count int32 texts, a key per 2048 tokens, copied and merged blocks, the output."""
    return batch * (4 * context + 8 * -(-context // 2048) + 40 * pair.block_size + 48)


def copy_ahead_table(pair: Pair = QWEN3_8B) -> str:
    """Tabulate what copying ahead adds to the same cycle on the H200."""
    rows = [
        f"| requests | tokens of text | KB | µs | + {LAUNCHES} launches, µs | cycle, ms | share |",
        "|" + "---:|" * 7,
    ]
    for batch, context in TEXTS:
        moved = copy_ahead_bytes(pair, batch, context)
        seconds = moved / H200.bandwidth
        cycle = cycle_seconds(pair, H200, batch, context)
        added = seconds + LAUNCHES * LAUNCH_S
        times = f"{1e6 * seconds:.3f} | {1e6 * added:.1f} | {1e3 * cycle:.1f} | {added / cycle:.2%}"
        rows.append(f"| {batch} | {context} | {moved / 1e3:.1f} | {times} |")
    return "\n".join(rows)


def work_table(pair: Pair = QWEN3_8B) -> str:
    """Tabulate bytes and FLOPs per phase."""
    rows = ["| batch | " + " | ".join(f"{p.__name__}: GB | GFLOP | FLOP/byte" for p in PHASES) + " |"]
    rows.append("|" + "---:|" * (1 + 3 * len(PHASES)))
    for batch in BATCHES:
        works = [phase(pair, batch, CONTEXT) for phase in PHASES]
        cells = [f"{w.bytes / 1e9:.2f} | {w.flops / 1e9:.0f} | {w.flops / w.bytes:.0f}" for w in works]
        rows.append(f"| {batch} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def time_table(gpu: Gpu, pair: Pair = QWEN3_8B) -> str:
    """Tabulate the lower bound of each phase and of the cycle, and the tokens/s that follow."""
    heads = [f"{phase.__name__}, ms" for phase in PHASES]
    heads += ["cycle, ms", "tokens/s", "no speculation, tokens/s"]
    rows = ["| batch | " + " | ".join(heads) + " | ratio | measured cycle, ms |"]
    rows.append("|" + "---:|" * (len(heads) + 3))
    for batch in BATCHES:
        works = [phase(pair, batch, CONTEXT) for phase in PHASES]
        cells = [f"{1e3 * work.seconds(gpu):.3f} {work.bound(gpu)}" for work in works]
        seconds = cycle_seconds(pair, gpu, batch, CONTEXT)
        speed = batch * ACCEPT_LENGTH / seconds
        plain = batch / no_speculation(pair, batch, CONTEXT).seconds(gpu)
        cells += [f"{1e3 * seconds:.3f}", f"{speed:.0f}", f"{plain:.0f}", f"{speed / plain:.2f}x"]
        cells.append("not measured yet")
        rows.append(f"| {batch} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def kernel_table(pair: Pair = QWEN3_8B) -> str:
    """Tabulate the bytes of the small kernels, and the H200's time to move them."""
    columns = [f"batch {batch}: KB | µs" for batch in BATCHES]
    rows = ["| kernel | bytes | " + " | ".join(columns) + " |", "|---|---|" + "---:|" * (2 * len(BATCHES))]
    for name, formula, count in SMALL_KERNELS:
        cells = [f"{n / 1e3:.1f} | {1e6 * n / H200.bandwidth:.3f}" for n in (count(pair, b) for b in BATCHES)]
        rows.append(f"| {name} | {formula} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def tables() -> dict[str, str]:
    return {
        "Bytes and FLOPs": work_table(),
        "H200": time_table(H200),
        "H100 SXM": time_table(H100),
        "Small kernels": kernel_table(),
        "Copy ahead": copy_ahead_table(),
    }


if __name__ == "__main__":
    for title, table in tables().items():
        print(f"## {title}\n\n{table}\n")
