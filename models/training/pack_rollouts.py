"""Keep the rollouts of `chat_rollouts.py` as tokens alone, and make shards of them again.

A shard holds six hidden states of every position, 500 times the size of its tokens. One forward pass of the
target over each row makes the states again.

    python pack_rollouts.py pack SHARD_DIR FILE.npz
    python pack_rollouts.py unpack FILE.npz TARGET_DIR SHARD_DIR [--part 0/2]
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from chat_rollouts import BatchedLlama, Row, Shards


def pack(shard_dir: Path, file: Path) -> None:
    """Write names, lengths, temperatures, tokens and the written positions of all shards."""
    paths = sorted(path for path in shard_dir.glob("*.pt") if not path.name.endswith(".argmax.pt"))
    shards = [torch.load(path, mmap=True) for path in paths]
    names = [name for path in paths for name in json.loads(path.with_suffix(".json").read_text())["names"]]

    def joined(field: str, dtype: str) -> np.ndarray:
        return np.concatenate([shard[field].numpy() for shard in shards]).astype(dtype)

    np.savez_compressed(
        file,
        names=np.array(names),
        lengths=joined("lengths", "uint16"),
        temperatures=joined("temperatures", "float32"),
        tokens=joined("tokens", "uint16"),
        written=np.packbits(joined("written", "bool")),
    )
    print(f"{len(names)} rows, {sum(len(shard['tokens']) for shard in shards)} tokens")


def packed_rows(file: Path) -> list[Row]:
    """Return the rows of a packed file."""
    packed = np.load(file)
    tokens = packed["tokens"].astype("int64")
    written = np.unpackbits(packed["written"], count=len(tokens)).astype(bool)
    ends = packed["lengths"].astype("int64").cumsum()[:-1]
    rows = []
    for name, temperature, row_tokens, row_written in zip(
        packed["names"], packed["temperatures"], np.split(tokens, ends), np.split(written, ends), strict=True
    ):
        row = Row(str(name), str(name).split("-")[0], float(temperature), row_tokens.tolist(), turns=None)
        row.written = row_written.tolist()
        rows.append(row)
    return rows


@torch.no_grad()
def unpack(file: Path, target_dir: Path, shard_dir: Path, part: tuple[int, int], size: int) -> None:
    """Write shards with the hidden states of each row, less the rows that are in a shard already."""
    shards = Shards(shard_dir, f"packed{part[0]}of{part[1]}", size)
    rows = [row for row in packed_rows(file)[part[0] :: part[1]] if row.name not in shards.done]
    model = BatchedLlama(target_dir, slots=1, length=max(len(row.tokens) for row in rows))
    for row in rows:
        positions = torch.arange(len(row.tokens))
        model.forward(torch.tensor(row.tokens), torch.zeros_like(positions), positions, chunk=True)
        shards.add(row, model.states[0, : len(row.tokens)])
    shards.write()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack")
    packing.add_argument("shard_dir", type=Path)
    packing.add_argument("file", type=Path)
    unpacking = commands.add_parser("unpack")
    unpacking.add_argument("file", type=Path)
    unpacking.add_argument("target_dir", type=Path)
    unpacking.add_argument("shard_dir", type=Path)
    unpacking.add_argument("--part", default="0/1", help="every N-th row, from the I-th: I/N")
    unpacking.add_argument("--shard-tokens", type=int, default=10000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.command == "pack":
        pack(args.shard_dir, args.file)
    else:
        index, parts = map(int, args.part.split("/"))
        unpack(args.file, args.target_dir, args.shard_dir, (index, parts), args.shard_tokens)


if __name__ == "__main__":
    main()
