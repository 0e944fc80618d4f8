"""Train a DFlash or DFlash2 draft on the shards of `chat_rollouts.py`.

The trainer reads new shards as they appear, so it can run beside the rollouts. A second run with the same
folders continues the first one. The saved draft is an average of the weights over the last steps. The average
stands in for a falling learning rate, so each checkpoint is ready to serve. Logits cover the batch's labels,
the most frequent tokens and some random ones, because the whole vocabulary would take most of the time.

    python train_chat_draft.py SHARD_DIR TARGET_DIR DRAFT_DIR --minutes 60
    python train_chat_draft.py SHARD_DIR TARGET_DIR DFLASH2_DIR --minutes 60 --plain DRAFT_DIR
    python train_chat_draft.py SHARD_DIR TARGET_DIR NEW_DIR --minutes 60 --start DRAFT_DIR  # either kind

Shapes: R rows, S positions, N anchors per row, B block size, V tokens in use, A captured layers,
H hidden size.
"""

import argparse
import json
import math
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from chat_rollouts import LEAST_WRITTEN, shard_paths, spread_layers
from dflash2_model import DFlash2Draft, dflash2_config
from draft_model import DFlashDraft, initialize
from pass_dtype import PASS_DTYPE
from safetensors.torch import load_file
from train_target import MasterWeights, join_processes, seconds_since, write_checkpoint

BLOCK_SIZE = 8
DECAY = 4.0  # slot k weighs exp(-(k - 1) / DECAY), the paper's choice for short blocks
PROMPT_SHARE = 0.15  # of the anchors, from the prompt instead of the answer
FREQUENT, RANDOM = 2048, 512
BASE_WEIGHT, UNCOVERED_WEIGHT = 0.5, 1.0


def chat_draft_config(target: dict, layers: int, intermediate_size: int, mask_id: int) -> dict:
    """Return the config.json of a DFlash draft for a Llama target."""
    shared = (
        "vocab_size hidden_size num_attention_heads num_key_value_heads head_dim hidden_act rms_norm_eps "
        "max_position_embeddings attention_bias attention_dropout initializer_range eos_token_id pad_token_id"
    ).split()
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": BLOCK_SIZE,
        "dflash_config": {
            "mask_token_id": mask_id,
            "target_layer_ids": spread_layers(target["num_hidden_layers"]),
        },
        "num_target_layers": target["num_hidden_layers"],
        "num_hidden_layers": layers,
        "intermediate_size": intermediate_size,
        "layer_types": ["full_attention"] * layers,
        "max_window_layers": layers,
        "use_sliding_window": False,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "rope_theta": target.get("rope_theta") or target["rope_parameters"]["rope_theta"],
        **{name: target[name] for name in shared},
    }


class ChatRows:
    """Rows of all shards in a folder, with tokens, states and the target's best tokens.

    `share` of the shards are read last: processes that begin at different ones share the work of finding best
    tokens.
    """

    def __init__(
        self, directory: Path, embedding: torch.Tensor, greedy_only: bool, seed: int, share: float = 0.0
    ):
        self.directory, self.embedding, self.greedy_only = directory, embedding, greedy_only
        self.share = share
        self.shards: dict[str, dict] = {}
        self.rows: list[tuple[dict, int, int]] = []  # shard, begin, end
        self.counts = torch.ones(len(embedding))
        self.generator = torch.Generator().manual_seed(seed)
        self.order: list[int] = []
        self.written = 0
        self.refresh()

    def refresh(self) -> None:
        """Read the shards that are new since the last call."""
        paths = shard_paths(self.directory)
        first = round(self.share * len(paths))
        for path in paths[first:] + paths[:first]:
            if path.name in self.shards:
                continue
            shard = torch.load(path, mmap=True)
            shard["argmax"] = self._argmax(path, shard["states"])
            self.shards[path.name] = shard
            ends = shard["lengths"].cumsum(0).tolist()
            for begin, end, temperature in zip([0, *ends], ends, shard["temperatures"].tolist()):
                written = int(shard["written"][begin:end].sum())
                if written >= LEAST_WRITTEN and not (self.greedy_only and temperature > 0):
                    self.rows.append((shard, begin, end))
                    self.written += written
            self.counts += torch.bincount(
                shard["argmax"].long()[shard["written"]], minlength=len(self.counts)
            )

    def _argmax(self, path: Path, states: torch.Tensor) -> torch.Tensor:
        """Return the target's best next token after every position, from a file if there is one."""
        kept = path.with_suffix(".argmax.pt")
        if not kept.exists():
            last = states[:, -self.embedding.shape[1] :]
            best = torch.cat(
                [(piece.to(PASS_DTYPE) @ self.embedding.T).max(-1).indices for piece in last.split(1024)]
            )
            partial = path.with_suffix(f".{os.getpid()}.partial")
            torch.save(best.to(torch.int32), partial)
            partial.rename(kept)
        return torch.load(kept)

    def _refill(self, rows: int) -> None:
        """Start an epoch.

        Long answers come several times, and rows of similar length come together.
        """
        repeats = [max(1, round((e - b) / 256)) for _, b, e in self.rows]
        order = [i for i, n in enumerate(repeats) for _ in range(n)]
        order = [order[i] for i in torch.randperm(len(order), generator=self.generator)]
        groups = []
        for begin in range(0, len(order), 16 * rows):
            near = sorted(order[begin : begin + 16 * rows], key=lambda i: self.rows[i][2] - self.rows[i][1])
            groups += [near[i : i + rows] for i in range(0, len(near), rows)]
        self.order = [groups[i] for i in torch.randperm(len(groups), generator=self.generator)]

    def draw(self, rows: int, anchors_per_row: int):
        """Draw one step's rows and anchors.

        Returns:
            tokens, argmax [R, S]; states [R, S, A * H + H]; anchors [R, N]; valid [R, N, B - 1].
        """
        if not self.order:
            self._refill(rows)
        picked = [self.rows[i] for i in self.order.pop()]

        def part(name: str) -> torch.Tensor:
            pieces = [shard[name][begin:end] for shard, begin, end in picked]
            rows = torch.nn.utils.rnn.pad_sequence(pieces, batch_first=True)
            # Few shapes, so that freed memory is used again.
            return F.pad(rows, (0, 0) * (rows.ndim - 2) + (0, -rows.shape[1] % 128))

        anchors, valid = [], []
        for shard, begin, end in picked:
            written = shard["written"][begin:end].nonzero().flatten()
            # A block needs a label, the last position's states are void, and anchor 0 has no context.
            usable = written[written < end - begin - 2]
            chosen = usable[torch.randint(len(usable), (anchors_per_row,), generator=self.generator)]
            others = torch.randint(1, end - begin - 2, (anchors_per_row,), generator=self.generator)
            is_other = torch.rand(anchors_per_row, generator=self.generator) < PROMPT_SHARE
            chosen = torch.where(is_other, others, chosen)
            anchors.append(chosen)
            slots = chosen[:, None] + torch.arange(1, BLOCK_SIZE)
            mask = shard["written"][begin:end]
            same_turn = mask[slots.clamp(max=end - begin - 1)] | ~mask[chosen, None]
            valid.append((slots < end - begin) & same_turn)
        return (
            part("tokens").long(),
            part("argmax").long(),
            part("states").to(PASS_DTYPE),
            torch.stack(anchors),
            torch.stack(valid),
        )

    def vocabulary(self, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids [V] of the tokens in use, and each token's place among them [vocab], or -1."""
        used = torch.zeros(len(self.counts), dtype=torch.bool)
        used[self.counts.topk(FREQUENT).indices] = True
        used[torch.randint(len(used), (RANDOM,), generator=self.generator)] = True
        used[labels.flatten()] = True
        ids = used.nonzero().flatten()
        places = torch.full((len(used),), -1)
        places[ids] = torch.arange(len(ids))
        return ids, places


def block_embeddings(tokens: torch.Tensor, embedding: torch.Tensor, config: dict) -> torch.Tensor:
    """Return [..., B, H]: the embedding of each anchor token [...], then the mask token's."""
    ids = tokens[..., None].repeat_interleave(config["block_size"], dim=-1)
    ids[..., 1:] = config["dflash_config"]["mask_token_id"]
    return F.embedding(ids, embedding)


def weighted(losses: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (losses * weights).sum() / weights.sum()


def plain_loss(hidden, head, labels, weights, last):
    """Return cross entropy towards the target's tokens, and hits [R, N, B - 1].

    Half of it towards the target's best tokens, half towards its distribution.
    """
    used = weights > 0
    with torch.no_grad():
        target = F.linear(last[used], head).float().softmax(-1).mul_(0.5)
        target.scatter_add_(-1, labels[used][:, None], torch.full((len(target), 1), 0.5))
    logits = F.linear(hidden[used], head)
    losses = -(target * logits.float().log_softmax(-1)).sum(-1)
    hits = torch.zeros_like(used)
    hits[used] = logits.argmax(-1) == labels[used]
    return (losses * weights[used]).sum() / weights.sum(), hits


def dflash2_loss(draft, hidden, head, labels, weights, ids, previous, last):
    """Return the sum of three losses over the tokens in use, and hits [R, N, B - 1].

    Args:
        draft: The DFlash2 draft.
        hidden: [R, N, B - 1, H], its output.
        head: [V, H], rows of the target's head.
        labels: [R, N, B - 1], places of the target's best tokens in `head`.
        weights: [R, N, B - 1], zero for slots without a label.
        ids: [V], the tokens that `head` stands for, in order.
        previous: [R, N, B - 1], the token before each slot.
        last: [R, N, B - 1, H], the input of the target's head there.
    """
    with torch.no_grad():
        target = F.linear(last.flatten(0, 2), head).float().softmax(-1).view(*labels.shape, -1)
    logits = F.linear(hidden.flatten(0, 2), head).float().view_as(target)
    base = -(target * logits.log_softmax(-1)).sum(-1)
    options = draft.config["dflash_config"]
    is_candidate = ids < (options.get("selector_vocab_size") or draft.config["vocab_size"])
    found = logits.detach()[..., : is_candidate.sum()].topk(options["selector_top_k"], dim=-1).indices
    scores = draft.candidate_selector(hidden, previous, ids[found], logits.gather(-1, found))
    wanted, log_probs = target.gather(-1, found), scores.log_softmax(-1)
    uncovered = 1 - torch.minimum(wanted, log_probs.exp()).sum(-1)
    chosen = -(wanted * log_probs).sum(-1)
    loss = weighted(BASE_WEIGHT * base + chosen + UNCOVERED_WEIGHT * uncovered, weights)
    return loss, found.gather(-1, scores.argmax(-1, keepdim=True)).squeeze(-1) == labels


def borrow_layers(draft, target: dict) -> None:
    """Start from weights of the target. Tried once: loss 8.4 after 40 steps, 15.5 without.

    The first layer takes the MLP of the target's first layer, the last one all of the layer after the last
    captured one. Its keys and values of the context are then the target's own.
    """
    first, last = draft.layers[0], draft.layers[-1]
    behind = draft.config["dflash_config"]["target_layer_ids"][-1] + 1
    mlp = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "post_attention_layernorm", "input_layernorm"]
    attention = [f"self_attn.{name}_proj" for name in "qkvo"]
    with torch.no_grad():
        for layer, number, names in ((first, 0, mlp), (last, behind, mlp + attention)):
            for name in names:
                weight = target[f"model.layers.{number}.{name}.weight"]
                layer.get_submodule(name).weight.copy_(weight)
        hidden = draft.config["hidden_size"]
        draft.fc.weight.zero_()
        draft.fc.weight[:, -hidden:].copy_(torch.eye(hidden))
        draft.hidden_norm.weight.copy_(target[f"model.layers.{behind}.input_layernorm.weight"])
        draft.norm.weight.copy_(target["model.norm.weight"])  # the scale that the borrowed head expects
        for norm in (last.self_attn.q_norm, last.self_attn.k_norm):  # Llama has none: about its scale
            norm.weight.fill_(2.0)


def new_draft(config: dict, target: dict, plain: Path | None):
    """Return a draft with fresh weights, or a DFlash2 one that starts as the plain draft."""
    if plain is None:
        draft = DFlashDraft(config)
        initialize(draft)
        borrow_layers(draft, target)
        return draft
    draft = DFlash2Draft(config)
    for module in draft.modules():  # the convolutions begin as the identity, the selector's gate small
        if hasattr(module, "kernel_projection"):
            torch.nn.init.zeros_(module.kernel_projection.weight)
    torch.nn.init.normal_(draft.candidate_selector.hidden_projection.weight, std=0.02)
    missing, unknown = draft.load_state_dict(load_file(str(plain / "model.safetensors")), strict=False)
    assert not unknown, unknown
    assert all("conv." in name or name.startswith("candidate_selector.") for name in missing), missing
    return draft


def started_draft(start: Path):
    """Return a trained draft of either kind, to go on from."""
    config = json.loads((start / "config.json").read_text())
    draft = (DFlash2Draft if "selector_rank" in config["dflash_config"] else DFlashDraft)(config)
    weights = load_file(str(start / "model.safetensors"))
    draft.load_state_dict(weights)
    return draft


class Training:
    """Weights, optimizers and their average, saved together."""

    def __init__(self, draft, muon_lr: float, adam_lr: float, path: Path):
        self.draft, self.path, self.step = draft, path, 0
        self.weights = MasterWeights(draft, muon_lr, adam_lr)
        self.masters = [master for _, master in self.weights.pairs]
        self.average = [master.clone() for master in self.masters]
        if path.exists():
            state = torch.load(path)
            self.step = state["step"]
            for kept, value in zip(
                self.masters + self.average, state["masters"] + state["average"], strict=True
            ):
                kept.copy_(value)
            for optimizer, value in zip(self.weights.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(value)
            with torch.no_grad():
                for parameter, master in self.weights.pairs:
                    parameter.copy_(master)

    def update(self, scale: float, longest: float) -> None:
        self.weights.step(scale)
        self.step += 1
        keep = min(longest, self.step / (self.step + 10))
        for kept, master in zip(self.average, self.masters, strict=True):
            kept.lerp_(master, 1 - keep)

    def save(self, directory: Path) -> None:
        """Write the averaged draft to `directory` and everything else to the state file."""
        names = [name for name, p in self.draft.named_parameters() if p.requires_grad]
        write_checkpoint(directory, self.draft.config, dict(zip(names, self.average, strict=True)))
        state = {
            "step": self.step,
            "masters": self.masters,
            "average": self.average,
            "optimizers": [optimizer.state_dict() for optimizer in self.weights.optimizers],
        }
        torch.save(state, self.path.with_suffix(".partial"))
        self.path.with_suffix(".partial").rename(self.path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("shard_dir", type=Path)
    parser.add_argument("target_dir", type=Path)
    parser.add_argument("draft_dir", type=Path)
    parser.add_argument("--plain", type=Path, help="train a DFlash2 draft that starts as this DFlash draft")
    parser.add_argument("--start", type=Path, help="go on from this draft, of either kind")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--steps", type=int, help="end after so many steps, whatever the minutes")
    parser.add_argument("--rows", type=int, default=12, help="per step, over all processes")
    parser.add_argument("--anchors", type=int, default=64, help="per row")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--intermediate-size", type=int, default=1536)
    parser.add_argument("--selector-rank", type=int, default=16)
    parser.add_argument("--candidates", type=int, help="how many first tokens a DFlash2 draft picks from")
    parser.add_argument("--mask-id", type=int, default=16, help="a token that the target never writes")
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=0.003)
    parser.add_argument("--average", type=float, default=0.99, help="share of the average that a step keeps")
    parser.add_argument("--greedy-only", action="store_true")
    parser.add_argument("--save-minutes", type=float, default=4)
    parser.add_argument("--finish", action="store_true", help="let the learning rate fall to zero by the end")
    args = parser.parse_args()
    if (args.steps if args.steps is not None else args.minutes) <= 0:
        parser.error("--steps and --minutes must be above 0")

    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank, processes = join_processes()
    target_config = json.loads((args.target_dir / "config.json").read_text())
    target = load_file(str(args.target_dir / "model.safetensors"))
    embedding = target["model.embed_tokens.weight"].to(PASS_DTYPE)
    if args.start:
        draft = started_draft(args.start)
    elif args.plain:
        config = dflash2_config(json.loads((args.plain / "config.json").read_text()))
        config["dflash_config"]["selector_rank"] = args.selector_rank
        draft = new_draft(config, target, args.plain)
    else:
        config = chat_draft_config(target_config, args.layers, args.intermediate_size, args.mask_id)
        draft = new_draft(config, target, None)
    config = draft.config
    if args.candidates is not None:
        config["dflash_config"]["selector_vocab_size"] = args.candidates
    state_path = args.draft_dir.with_name(args.draft_dir.name + ".state.pt")
    training = Training(draft, args.muon_lr, args.adam_lr, state_path)
    seed = training.step + 1000000 * rank
    rows = ChatRows(args.shard_dir, embedding, args.greedy_only, seed=seed, share=rank / processes)
    print(f"{len(rows.rows)} rows, {rows.written} written tokens, from step {training.step}", flush=True)
    if not rows.rows:
        parser.error(f"{args.shard_dir} has no row with {LEAST_WRITTEN} written tokens to train on")
    slot_weights = torch.exp(-torch.arange(BLOCK_SIZE - 1) / DECAY)
    aux_width = len(config["dflash_config"]["target_layer_ids"]) * config["hidden_size"]
    offsets = torch.arange(BLOCK_SIZE - 1)

    began, saved, running, first = time.time(), time.time(), None, training.step
    done = 0.0
    while done < 1:
        tokens, argmax, states, anchors, valid = rows.draw(args.rows // processes, args.anchors)
        # The token AT anchor + k follows position anchor + k - 1.
        before = (anchors[..., None] + offsets).clamp(max=tokens.shape[1] - 1)
        labels = argmax.gather(1, before.flatten(1)).view_as(before)
        ids, places = rows.vocabulary(labels[valid])
        head = embedding[ids]
        placed = places[labels].clamp(min=0)
        embeds = block_embeddings(tokens.gather(1, anchors), embedding, config)
        hidden = draft(embeds, states[..., :aux_width], anchors)[:, :, 1:]
        weights = slot_weights * valid
        index = torch.arange(len(tokens))[:, None, None]
        last = states[..., aux_width:][index, before]
        if isinstance(draft, DFlash2Draft):
            loss, hits = dflash2_loss(draft, hidden, head, placed, weights, ids, tokens[index, before], last)
        else:
            loss, hits = plain_loss(hidden, head, placed, weights, last)
        loss.backward()
        seconds = seconds_since(began)
        steps = training.step - first + 1
        done = steps / args.steps if args.steps else seconds / (60 * args.minutes)
        # 30 steps, or a tenth of the whole if that is less.
        warmup = min(1.0, max(steps / 30, 10 * done))
        training.update(min(warmup, max(0.0, 1 - done) / 0.6) if args.finish else warmup, args.average)

        now = torch.cat((loss.detach()[None], ((hits & valid).sum((0, 1)) / valid.sum((0, 1)).clamp(min=1))))
        running = now if running is None else 0.96 * running + 0.04 * now
        if training.step % 20 == 0 or done >= 1:
            accuracy = [round(hit, 3) for hit in running[1:].tolist()]
            chain = sum(math.prod(accuracy[: k + 1]) for k in range(len(accuracy)))
            line = {
                "step": training.step,
                "loss": round(running[0].item(), 3),
                "slot_accuracy": accuracy,
                "chain": round(1 + chain, 3),
                "written": rows.written,
                "seconds": round(seconds),
            }
            if rank == 0:
                print(json.dumps(line), flush=True)
            rows.refresh()
        if rank == 0 and (time.time() - saved > 60 * args.save_minutes or done >= 1):
            saved = time.time()
            training.save(args.draft_dir)


if __name__ == "__main__":
    main()
