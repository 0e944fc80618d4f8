"""Carry compiled kernels from one GPU machine to the next.

    python3 benchmark/gpu/offline/caches.py save FOLDER      # on the old machine, at the end
    python3 benchmark/gpu/offline/caches.py load FOLDER      # on the new one, before the first server

FOLDER gets pieces of at most 16 MiB of one archive, for machines that limit the size of a file.
"""

import argparse
import io
import lzma
import sys
import tarfile
from pathlib import Path

# Of FlashInfer, SGLang, its just-in-time compiler and Triton.
CACHES = (".cache/flashinfer", ".cache/sglang", ".cache/tvm-ffi", ".triton/cache")
PIECE_BYTES = 16 << 20


def save(folder: Path, home: Path, piece_bytes: int = PIECE_BYTES) -> int:
    """Write the caches that exist below `home` to pieces in `folder`; return their number."""
    archive = io.BytesIO()
    with (
        lzma.open(archive, "wb", preset=1) as packed,
        tarfile.open(fileobj=packed, mode="w|") as out,
    ):
        for name in CACHES:
            if (home / name).is_dir():
                out.add(home / name, name)
    data = archive.getvalue()
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("caches-*.bin"):
        old.unlink()
    starts = range(0, len(data), piece_bytes)
    for number, start in enumerate(starts):
        (folder / f"caches-{number:02d}.bin").write_bytes(data[start : start + piece_bytes])
    return len(starts)


def load(folder: Path, home: Path) -> None:
    """Extract the pieces in `folder` below `home`."""
    data = b"".join(piece.read_bytes() for piece in sorted(folder.glob("caches-*.bin")))
    with tarfile.open(fileobj=io.BytesIO(lzma.decompress(data))) as packed:
        packed.extractall(home, filter="data")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("save", "load"))
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    if args.action == "save":
        print(f"{save(args.folder, Path.home())} pieces")
    else:
        load(args.folder, Path.home())
    return 0


if __name__ == "__main__":
    sys.exit(main())
