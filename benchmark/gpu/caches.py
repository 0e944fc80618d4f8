"""Compiled kernels in pieces of one archive. On the next machine: `cat caches-*.bin | tar -xJ -C ~`."""

import io
import lzma
import tarfile
from pathlib import Path

from gpu.measure import Session

# Of FlashInfer, SGLang, its just-in-time compiler and Triton.
CACHES = (".cache/flashinfer", ".cache/sglang", ".cache/tvm-ffi", ".triton/cache")
PIECE_BYTES = 16 << 20  # machines limit the size of a file


def save(session: Session, home: Path) -> dict:
    """Write the caches that exist below `home` to the folder of the figures."""
    archive = io.BytesIO()
    with lzma.open(archive, "wb", preset=1) as packed, tarfile.open(fileobj=packed, mode="w|") as out:
        found = [name for name in CACHES if (home / name).is_dir()]
        for name in found:
            out.add(home / name, name)
    data, folder = archive.getvalue(), session.figures.folder / "caches"
    folder.mkdir(exist_ok=True)
    starts = range(0, len(data), PIECE_BYTES)
    for number, start in enumerate(starts):
        (folder / f"caches-{number:02d}.bin").write_bytes(data[start : start + PIECE_BYTES])
    return {"caches": found, "megabytes": len(data) / 1e6, "pieces": len(starts)}
