"""Carry compiled kernels from one GPU machine to the next.

    python3 benchmark/gpu/caches.py save FOLDER      # on the old machine, after the first servers
    python3 benchmark/gpu/caches.py load FOLDER      # on the new one, before the first server

FOLDER gets pieces of one archive, as machines limit the size of a file. Only Python itself is imported.
"""

import importlib.util
import io
import lzma
import shutil
import sys
import tarfile
from pathlib import Path

# What has been compiled, by the names of `parts.COLD_S`: a file each.
COMPILED = ".cache/sglang-dflash-gpu"
# Of FlashInfer, SGLang, its just-in-time compiler and Triton.
CACHES = (COMPILED, ".cache/flashinfer", ".cache/sglang", ".cache/tvm-ffi", ".triton/cache")
PIECE_BYTES, MOST_PIECES = 15 << 20, 4


def save(folder: Path, home: Path) -> int:
    """Write the caches below `home`, less object files; return the number of pieces.

    Raises ValueError above MOST_PIECES: what does not come back whole is of no use.
    """
    archive = io.BytesIO()
    with lzma.open(archive, "wb", preset=1) as packed, tarfile.open(fileobj=packed, mode="w|") as out:
        for name in CACHES:
            if (home / name).is_dir():
                out.add(home / name, name, filter=lambda file: None if file.name.endswith(".o") else file)
    data = archive.getvalue()
    starts = range(0, len(data), PIECE_BYTES)
    if len(starts) > MOST_PIECES:
        raise ValueError(f"{len(data) / 1e6:.0f} MB of caches are more than {MOST_PIECES} pieces")
    folder.mkdir(parents=True, exist_ok=True)
    for number, start in enumerate(starts):
        (folder / f"caches-{number:02d}.bin").write_bytes(data[start : start + PIECE_BYTES])
    return len(starts)


def load(folder: Path, home: Path) -> int:
    """Extract the pieces in `folder` below `home`; return the number of FlashInfer's libraries put in place.

    FlashInfer asks ninja about a library in its cache, and ninja finds the sources newer. A library under the
    package's `data/aot/NAME/NAME.so` is loaded before ninja is asked (`flashinfer/jit/env.py`).
    """
    data = b"".join(piece.read_bytes() for piece in sorted(folder.glob("caches-*.bin")))
    with tarfile.open(fileobj=io.BytesIO(lzma.decompress(data))) as packed:
        packed.extractall(home, filter="data")
    package = importlib.util.find_spec("flashinfer")
    if package is None or not package.submodule_search_locations:
        return 0
    aot, placed = Path(package.submodule_search_locations[0]) / "data" / "aot", 0
    for library in (home / ".cache/flashinfer").glob("**/cached_ops/*/*.so"):
        if library.stem == library.parent.name:
            (aot / library.stem).mkdir(parents=True, exist_ok=True)
            shutil.copy2(library, aot / library.stem / library.name)
            placed += 1
    return placed


if __name__ == "__main__":
    action = {"save": save, "load": load}[sys.argv[1]]
    try:
        print(f"{sys.argv[1]}: {action(Path(sys.argv[2]), Path.home())}")
    except (ValueError, OSError, lzma.LZMAError, tarfile.TarError) as error:
        sys.exit(f"{sys.argv[1]}: {error}")
