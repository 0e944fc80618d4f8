"""Random arguments of the Triton kernels and their twins. The same seed gives equal ones."""

import torch

from sglang_dflash.kernels.ops.speculative import context_kv, peagle_rows
from sglang_dflash.kernels.ops.speculative.context_kv import KVPoolPointers
from sglang_dflash.kernels.ops.speculative.penalties import PenaltyTerms
from sglang_dflash.kernels.ops.speculative.selector_walk import Candidates, DrawInputs
from sglang_dflash.srt.layers.draft_probs import DraftProbs
from sglang_dflash.srt.speculative.cycle.layout import VerifyLayout


def random_blocks(seed: int, bs: int, block_size: int, device: str) -> tuple:
    """Return arguments of prepare_block.

    The table is a slice of a wider one, as its rows need not be contiguous. Blocks may reach past it.
    """
    rng = torch.Generator().manual_seed(seed)
    max_len = 40 + block_size
    table = torch.randint(2**31 - 1, (bs + 3, max_len + 5), generator=rng, dtype=torch.int32)[:, :max_len]
    bonus = torch.randint(150_000, (bs,), generator=rng)
    seq_lens = torch.randint(max_len, (bs,), generator=rng)
    rows = torch.randperm(bs + 3, generator=rng)[:bs]
    return *(x.to(device) for x in (bonus, seq_lens, rows, table)), 151_669, block_size


def random_lengths(seed: int, bs: int, block_size: int, device: str, is_ragged: bool) -> tuple:
    """Return arguments of block_offsets, with int64 lengths."""
    lengths = torch.randint(2**20, (bs,), generator=torch.Generator().manual_seed(seed)).to(device)
    counts = torch.arange(bs, dtype=torch.int32, device=device) % (block_size + 1) if is_ragged else None
    return lengths, block_size, counts


def random_window(seed: int, bs: int, size: int, page: int, columns: int, device: str) -> tuple:
    """Return arguments of prepare_window. Windows may reach past the source; rows are not contiguous."""
    rng = torch.Generator().manual_seed(seed)
    source = torch.randint(2**31 - 1, (bs + 3, 70), generator=rng, dtype=torch.int32)[:, :64]
    seq_lens, requests = torch.randint(64, (bs,), generator=rng), torch.randperm(bs + 3, generator=rng)[:bs]
    table = torch.full((bs + 3, 40), -1, dtype=torch.int32)
    return *(x.to(device) for x in (seq_lens, requests, source, table)), size, page, columns


def random_rows(
    seed: int, bs: int, block_size: int, hidden: int, device: str, last_start: int | None = None
) -> list:
    """Return arguments of prepare_rows.

    Texts have all lengths, some at the end of the table, and 1 to B rows are pending.
    """
    rng = torch.Generator().manual_seed(seed)
    slots, max_len, width = bs + 3, 40, 2 * (block_size - 1)
    lengths = 1 + torch.randint(max_len - block_size, (bs,), generator=rng)
    pending = peagle_rows.PendingRows(
        tokens=torch.randint(150_000, (slots, block_size), generator=rng).to(device),
        fused=torch.randn(slots, block_size, hidden, generator=rng).to(device, torch.bfloat16),
        count=1 + torch.randint(block_size, (slots,), generator=rng).to(device),
        was_run=torch.randint(2, (slots,), generator=rng, dtype=torch.int32).to(device),
    )
    requests = torch.randperm(slots, generator=rng)[:bs].to(device)
    pending.count[requests] = torch.minimum(pending.count[requests], lengths.to(device))
    tables = torch.randint(2**31 - 1, (2, slots, max_len + width), generator=rng, dtype=torch.int32).to(
        device
    )
    fused, first = torch.zeros(bs * width, hidden, dtype=torch.bfloat16), torch.zeros(bs, dtype=torch.int64)
    return [
        requests,
        lengths.to(device),
        pending,
        peagle_rows.RequestTables(tables[0, :, :max_len], tables[1], 151_669, last_start),
        torch.randn(hidden, generator=rng).to(device, torch.bfloat16),
        fused.to(device),
        first.to(device),
    ]


def random_appended(
    seed: int, bs: int, width: int, block_size: int, hidden: int, device: str, is_ragged: bool = False
) -> list:
    """Return arguments of append_rows, of requests that have room for what they append.

    is_ragged: requests verify fewer slots than their width, and the rows of the forward follow each other.
    """
    pending = random_rows(seed, bs, block_size, hidden, device)[2]
    rng = torch.Generator().manual_seed(seed)
    requests = torch.randperm(bs + 3, generator=rng)[:bs].to(device)
    lengths = torch.full((bs,), width - 1)
    slots = None
    if is_ragged:
        lengths = torch.randint(width, (bs,), generator=rng)
        starts = lengths.cumsum(0) - lengths + torch.arange(bs)
        slots = (starts[:, None] + torch.arange(width).minimum(lengths[:, None])).to(device)
    accept_len = (torch.rand(bs, generator=rng) * (lengths + 1)).int().to(device)
    pending.count[requests] = torch.minimum(pending.count[requests], block_size - accept_len - 1)
    tokens = torch.randint(150_000, (bs, width), generator=rng).to(device)
    fused = torch.randn(bs * width, hidden, generator=rng).to(device, torch.bfloat16)
    return [requests, accept_len, tokens, fused, slots, pending]


def random_verdicts(seed: int, bs: int, block_size: int, device: str) -> tuple[torch.Tensor, ...]:
    """Return drafted blocks, the target's tokens, and the next arguments of accept_blocks.

    Rows agree up to a random slot, and by chance beyond it. Some logits are broken.
    """
    rng = torch.Generator().manual_seed(seed)
    values = torch.tensor([0, 1, 2**40])  # the last beyond int32
    target = values[torch.randint(3, (bs, block_size), generator=rng)]
    tokens = torch.cat([torch.zeros(bs, 1, dtype=torch.int64), target[:, :-1]], dim=1)
    flips = torch.randint(2, tokens.shape, generator=rng)
    kept = torch.randint(block_size, (bs, 1), generator=rng)
    tokens += flips * (torch.arange(block_size) > kept)
    values = torch.tensor([*[3.0, -2e38] * 10, torch.nan, torch.inf, -torch.inf])
    best = values[torch.randint(len(values), (bs, block_size), generator=rng)]
    return *(x.to(device) for x in (tokens, target, best, torch.randint(2**40, (bs,), generator=rng))), 2**41


EPS = 1e-6


class Context:
    """Random arguments of write_context_kv, and pools whose unwritten slots hold NaN."""

    def __init__(self, seed, rows, layers, heads, head_dim, kv_dtype, pool_dtype, table_dtype, device):
        page_size, rng = 4, torch.Generator().manual_seed(seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=rng)

        self.kv = (random(rows, layers, 2, heads, head_dim) * 3).to(device, kv_dtype)
        self.weight = (1 + random(layers, head_dim) / 4).to(device, kv_dtype)
        angles = torch.arange(64)[:, None] / 10_000 ** (torch.arange(head_dim // 2) / (head_dim // 2))
        self.table = torch.cat([angles.cos(), angles.sin()], dim=-1).to(device, table_dtype)
        self.positions = torch.randint(64, (rows,), generator=rng).to(device)
        pages = -(-rows // page_size) + 3
        slots = torch.randperm(pages, generator=rng)[:, None] * page_size + torch.arange(page_size)
        self.cache_loc = slots.flatten()[:rows].to(device)
        self.pool_shape = (layers, 2, pages * page_size, heads, head_dim)
        self.pool_dtype = pool_dtype

    def written_by(self, write, **options) -> torch.Tensor:
        """Return the pool's contents, float32 [layers, 2, slots, heads, head_dim]."""
        buffers = torch.full(self.pool_shape, torch.nan).to(self.kv.device, self.pool_dtype)
        write(*self.arguments(KVPoolPointers.from_pools(*buffers.unbind(1))), **options)
        return buffers.float()

    def by_both(self, **options) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the kernel and its twin write."""
        writers = context_kv.write_context_kv.__wrapped__, context_kv.write_context_kv_torch
        got, want = (self.written_by(write, **options) for write in writers)
        return got, want

    def arguments(self, pool: KVPoolPointers) -> tuple:
        return self.kv, self.weight, EPS, self.table, self.positions, self.cache_loc, pool


def random_convolution(
    blocks: int, width: int, hidden: int, groups: int, taps: int, dtype: torch.dtype = torch.float32
):
    """Return x, base, and the deltas of the second side, which are not contiguous."""
    generator = torch.Generator().manual_seed(0)
    tensors = (
        torch.randn(blocks * width, hidden, generator=generator),
        torch.randn(taps, hidden, generator=generator),
        torch.randn(blocks * width, 2, taps, groups, generator=generator),
    )
    x, base, deltas = (tensor.to(dtype) for tensor in tensors)
    return x, base, deltas[:, 1]


def random_texts(seed: int, bs: int, longest: int, vocabulary: int, device: str):
    """Return texts of few different tokens in the rows of a history.

    Some tokens may not be copied.
    """
    rng = torch.Generator().manual_seed(seed)
    lengths = 1 + torch.randint(longest, (bs,), generator=rng)
    history = torch.randint(
        -1 if seed % 3 == 0 else 0, vocabulary, (bs + 3, longest + 20), generator=rng, dtype=torch.int32
    )
    rows = torch.randperm(bs + 3, generator=rng)[:bs]
    return (*(x.to(device) for x in (history, rows, lengths - 1)),)


NO_LIMIT = 1 << 30  # SGLang's value for top_k = -1


def random_tokens(seed: int, bs: int, width: int, device: str) -> torch.Tensor:
    """Return the output [bs, width] of blocks."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(1000, (bs, width), generator=rng).to(device)


def random_walk(
    seed: int, bs: int, slots: int, candidates: int, rank: int, vocab: int = 50, spread: float = 2.0
):
    """Return (Candidates, anchors [bs], left and right codebooks [vocab, rank])."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    logits = spread * normal(bs, slots, vocab)
    unary, ids = logits.topk(candidates, dim=2)
    anchors = torch.randint(vocab, (bs,), generator=generator)
    codebooks = normal(vocab, rank), normal(vocab, rank) * rank**-0.5
    return Candidates(ids, unary, normal(bs, slots, rank)), anchors, *codebooks


def drawing(bs: int, slots: int, temperature=1.0, top_k=NO_LIMIT, top_p=1.0, min_p=0.0, seed=3) -> DrawInputs:
    uniforms = torch.rand(bs, slots, generator=torch.Generator().manual_seed(seed))
    number = torch.full((bs,), 1.0)
    return DrawInputs(
        temperature=number * temperature,
        top_k=torch.full((bs,), top_k, dtype=torch.int32),
        top_p=number * top_p,
        min_p=number * min_p,
        uniforms=uniforms,
    )


def random_counts(rng: torch.Generator, rows: int, vocabulary: int) -> torch.Tensor:
    counts = torch.randint(4, (rows, vocabulary), generator=rng, dtype=torch.int32)
    return counts * torch.randint(2, counts.shape, generator=rng, dtype=torch.int32)


def random_penalties(
    seed: int,
    bs: int,
    width: int,
    vocabulary: int,
    device: str,
    dtype: torch.dtype = torch.float32,
    has_stops: bool = True,
    is_ragged: bool = False,
) -> tuple:
    """Return arguments of penalize_block. Rows of the logits are not contiguous."""
    rng, rows = torch.Generator().manual_seed(seed), bs + 3
    likely = torch.tensor([0, 5, 1023, 1024, vocabulary - 1])  # often equal, and at the ends of tiles
    block = likely[torch.randint(5, (bs, width), generator=rng)]
    logits = 4 * torch.randn(bs * width, vocabulary + 2, generator=rng).to(dtype)
    logits[logits > 8] = -torch.inf
    prompt_lens = torch.randint(1, 9, (bs,), generator=rng)
    stops = torch.zeros(bs, vocabulary)
    stops[:, [3, 1024]] = -torch.inf
    penalties = torch.randn(3, bs, 1, generator=rng)
    penalties[2] = 0.5 + torch.rand(bs, 1, generator=rng)
    columns = *penalties, torch.randint(12, (bs, 1), generator=rng), prompt_lens[:, None]
    terms = PenaltyTerms(*(column.to(device) for column in columns), stops.to(device) if has_stops else None)
    requests = torch.randperm(rows, generator=rng)[:bs]
    lengths = prompt_lens + torch.randint(9, (bs,), generator=rng)
    inputs = *(x.to(device) for x in (block, random_counts(rng, rows, vocabulary), requests, lengths)), terms
    logits = logits.to(device)
    if is_ragged:
        layout = VerifyLayout(bs, width, torch.randint(width, (bs,), generator=rng).numpy(), device)
        inputs, logits = (*inputs, *layout.bounds), layout.to_rows(logits.view(bs, width, -1))
    return logits[:, :vocabulary], *inputs


def random_output(seed: int, bs: int, width: int, vocabulary: int, device: str) -> tuple[torch.Tensor, ...]:
    """Return arguments of count_tokens, with tokens that occur several times."""
    rng = torch.Generator().manual_seed(seed)
    counts, requests = random_counts(rng, bs + 3, vocabulary), torch.randperm(bs + 3, generator=rng)[:bs]
    tokens = 1020 + torch.randint(4, (bs, width), generator=rng)
    accept_len = torch.randint(width, (bs,), generator=rng, dtype=torch.int32)
    return (*(tensor.to(device) for tensor in (counts, requests, tokens, accept_len)),)


def random_drawn_blocks(
    seed: int, bs: int, width: int, vocabulary: int, candidates: int, device: str
) -> tuple:
    """Return a batch of drawn drafts that are often right.

    A block, the target's probabilities [bs, width, vocabulary], the draft's, uniforms to accept by and for
    the final token.
    """
    rng = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(bs, width, vocabulary, generator=rng)
    noise = 0.5 * torch.randn(bs, width - 1, vocabulary, generator=rng)
    probs, ids = (logits[:, :-1] + noise).softmax(dim=2).topk(candidates, dim=2)
    probs /= probs.sum(dim=2, keepdim=True)
    drawn = probs.flatten(0, 1).multinomial(1, generator=rng).view(bs, width - 1, 1)
    block = torch.nn.functional.pad(ids.gather(2, drawn).squeeze(2), (1, 0))
    uniforms = torch.rand(bs, width - 1, generator=rng), torch.rand(bs, generator=rng)
    draft = DraftProbs(ids.to(device), probs.to(device))
    return block.to(device), logits.softmax(dim=2).to(device), draft, *(u.to(device) for u in uniforms)
