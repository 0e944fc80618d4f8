"""Keep rows of the target's answers as tokens alone, and make shards with hidden states of them.

A shard holds six hidden states of every position, 500 times the size of its tokens. One forward pass of the
target over each row makes them. A run that was stopped goes on.

    python pack_rollouts.py FILE.npz TARGET_DIR SHARD_DIR [--part 0/2]
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from chat_rollouts import Llama, Row, Shards


def save_rows(file: Path, rows: list[Row]) -> None:
    """Write names, lengths, temperatures, tokens and the written positions of rows."""
    np.savez_compressed(
        file,
        names=np.array([row.name for row in rows]),
        lengths=np.array([len(row.tokens) for row in rows], dtype="uint32"),
        temperatures=np.array([row.temperature for row in rows], dtype="float32"),
        tokens=np.concatenate([row.tokens for row in rows]).astype("uint32"),
        written=np.packbits(np.concatenate([row.written for row in rows])),
    )


def packed_rows(file: Path) -> list[Row]:
    """Return the rows of a packed file."""
    packed = np.load(file)
    tokens = packed["tokens"].astype("int64")
    written = np.unpackbits(packed["written"], count=len(tokens)).astype(bool)
    ends = packed["lengths"].astype("int64").cumsum()[:-1]
    columns = packed["names"], packed["temperatures"], np.split(tokens, ends), np.split(written, ends)
    rows = []
    for name, temperature, row_tokens, row_written in zip(*columns, strict=True):
        row = Row(str(name), str(name).split("-")[0], float(temperature), row_tokens.tolist())
        row.written = row_written.tolist()
        rows.append(row)
    return rows


@torch.no_grad()
def unpack(file: Path, target_dir: Path, shard_dir: Path, part: tuple[int, int], size: int) -> None:
    """Write shards with the hidden states of each row, less the rows that are in a shard already."""
    shards = Shards(shard_dir, f"packed{part[0]}of{part[1]}", size)
    rows = [row for row in packed_rows(file)[part[0] :: part[1]] if row.name not in shards.done]
    target = Llama(target_dir, length=max(len(row.tokens) for row in rows))
    for row in rows:
        shards.add(row, target.states(torch.tensor(row.tokens)))
    shards.write()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("target_dir", type=Path)
    parser.add_argument("shard_dir", type=Path)
    parser.add_argument("--part", default="0/1", help="every N-th row, from the I-th: I/N")
    parser.add_argument("--shard-tokens", type=int, default=10000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    index, parts = map(int, args.part.split("/"))
    unpack(args.file, args.target_dir, args.shard_dir, (index, parts), args.shard_tokens)


if __name__ == "__main__":
    main()
