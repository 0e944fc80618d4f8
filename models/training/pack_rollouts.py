"""Keep the rollouts of `chat_rollouts.py` as tokens alone, and make shards of them again.

A shard holds six hidden states of every position, 500 times the size of its tokens. One forward pass of the
target over each row makes the states again. `generate_answers.py` writes packed pieces at once.

    python pack_rollouts.py pack SHARD_OR_PIECE_DIR FILE.npz
    python pack_rollouts.py unpack FILE.npz TARGET_DIR SHARD_DIR [--part 0/2]
"""

import argparse
import json
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from chat_rollouts import BatchedLlama, Row, Shards, shard_paths


def save_rows(file: Path | BinaryIO, rows: list[Row]) -> None:
    """Write names, lengths, temperatures, tokens and the written positions of rows."""
    np.savez_compressed(
        file,
        names=np.array([row.name for row in rows]),
        lengths=np.array([len(row.tokens) for row in rows], dtype="uint16"),
        temperatures=np.array([row.temperature for row in rows], dtype="float32"),
        tokens=np.concatenate([row.tokens for row in rows]).astype("uint16"),
        written=np.packbits(np.concatenate([row.written for row in rows])),
    )


def make_rows(names, lengths, temperatures, tokens: np.ndarray, written: np.ndarray) -> list[Row]:
    """Return one row per name from columns; `tokens` and `written` hold all rows behind each other."""
    ends = lengths.astype("int64").cumsum()[:-1]
    rows = []
    for name, temperature, row_tokens, row_written in zip(
        names, temperatures, np.split(tokens, ends), np.split(written, ends), strict=True
    ):
        row = Row(str(name), str(name).split("-")[0], float(temperature), row_tokens.tolist(), turns=None)
        row.written = row_written.tolist()
        rows.append(row)
    return rows


def shard_rows(path: Path) -> list[Row]:
    """Return the rows of a shard, without their states."""
    shard = torch.load(path, mmap=True)
    names = json.loads(path.with_suffix(".json").read_text())["names"]
    columns = (shard[field].numpy() for field in ("lengths", "temperatures", "tokens", "written"))
    return make_rows(names, *columns)


def packed_rows(file: Path) -> list[Row]:
    """Return the rows of a packed file."""
    packed = np.load(file)
    tokens = packed["tokens"].astype("int64")
    written = np.unpackbits(packed["written"], count=len(tokens)).astype(bool)
    return make_rows(packed["names"], packed["lengths"], packed["temperatures"], tokens, written)


def pack(directory: Path, file: Path) -> None:
    """Write the rows of all shards, and of all packed pieces, of a folder to one file."""
    rows = [row for path in shard_paths(directory) for row in shard_rows(path)]
    rows += [row for path in sorted(directory.glob("*.npz")) for row in packed_rows(path)]
    save_rows(file, rows)
    print(f"{len(rows)} rows, {sum(len(row.tokens) for row in rows)} tokens")


class Pieces:
    """Finished rows of one process, written in files of about `size` written tokens."""

    def __init__(self, directory: Path, prefix: str, size: int):
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.prefix, self.size = directory, prefix, size
        self.done = {row.name for path in directory.glob("*.npz") for row in packed_rows(path)}
        self.paths = sorted(directory.glob(f"{prefix}-*.npz"))
        self.total = sum(sum(row.written) for path in self.paths for row in packed_rows(path))
        self.rows: list[Row] = []

    def add(self, row: Row) -> None:
        """Keep a finished row, and write a piece if enough rows have come together."""
        self.rows.append(row)
        self.total += sum(row.written)
        if sum(sum(row.written) for row in self.rows) >= self.size:
            self.write()

    def write(self) -> None:
        """Write the rows that are in no piece yet; a file appears whole or not at all."""
        if self.rows:
            path = self.directory / f"{self.prefix}-{len(self.paths):04d}.npz"
            partial = path.with_suffix(".partial")
            with partial.open("wb") as file:
                save_rows(file, self.rows)
            partial.rename(path)
            self.paths.append(path)
            self.rows = []


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
    packing.add_argument("directory", type=Path)
    packing.add_argument("file", type=Path)
    unpacking = commands.add_parser("unpack")
    unpacking.add_argument("file", type=Path)
    unpacking.add_argument("target_dir", type=Path)
    unpacking.add_argument("directory", type=Path)
    unpacking.add_argument("--part", default="0/1", help="every N-th row, from the I-th: I/N")
    unpacking.add_argument("--shard-tokens", type=int, default=10000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.command == "pack":
        pack(args.directory, args.file)
    else:
        index, parts = map(int, args.part.split("/"))
        unpack(args.file, args.target_dir, args.directory, (index, parts), args.shard_tokens)


if __name__ == "__main__":
    main()
