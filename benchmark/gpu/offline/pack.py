"""Collect SGLang and all it needs for a machine with a GPU and without a network.

    python benchmark/gpu/offline/pack.py OUT
    python benchmark/gpu/offline/pack.py OUT --fa3 64 128 256 --part-mib 40

Downloads the wheels of wheels.txt for the GPU machine's Python, drops what text generation on one GPU does
not use, and writes OUT/part-1, part-2, ...: folders small enough to be carried one by one, each with shards
and the manifest. `unpack.py` installs them. Needs about 4 GB of disk, and minutes.
"""

import argparse
import concurrent.futures
import fnmatch
import hashlib
import io
import json
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, benchmark/ is not on the path

from gpu.offline.fatbin import ELF64, is_fa3_needed, thin  # noqa: E402

MIB = 1 << 20
SHARD_BYTES = 64 * MIB  # of a shard before it is packed; a larger file is cut
FA3_LIBRARY = "sgl_kernel/flash_ops.abi3.so"
WHEELS = Path(__file__).with_name("wheels.txt")

# Left out of the wheels; '*' also stands for '/'.
DROPPED = (
    *("*.data/*", "*.pyi"),
    *("torch/include/*", "torch/share/*", "torch/bin/protoc*", "torch/lib/*.a", "torch/test/*"),
    # Triton's profiler, other vendors, other generations.
    *("triton/backends/nvidia/lib/cupti*", "triton/backends/nvidia/bin/ptxas-blackwell"),
    *("triton/backends/nvidia/bin/nvdisasm", "triton/_C/libproton.so", "triton/FileCheck"),
    *("triton/plugins/*", "triton/instrumentation/*", "triton/backends/amd/include/*"),
    # Multi-head latent attention, sparse attention, Blackwell.
    *("sgl_kernel/flashmla_ops.abi3.so", "sgl_kernel/infllm_ops*.so", "sgl_kernel/sm100/*"),
    # Diffusion models, and servers written in Rust.
    *("sglang/multimodal_gen/*", "sglang/srt/rust_extensions/_server*.so"),
    *("sglang/srt/rust_extensions/_bench*.so", "sglang/srt/rust_extensions/_grpc*.so"),
    *("flashinfer/data/csrc/cake_sampling/generated/*", "flashinfer/data/csrc/cake_dsv4/*"),
    *("flashinfer/data/csrc/kda/*", "flashinfer/data/cutlass/examples/*"),
    *("flashinfer/data/cutlass/python/*", "flashinfer/data/cutlass/test/*"),
    *("flashinfer/data/cutlass/media/*", "flashinfer/data/cutlass/docs/*"),
    *("flashinfer/fused_moe/backends/cudnn_frost/artifacts/*",),
    *("nvidia/nccl/include/*", "nvidia/nccl/lib/libnccl_device.bc"),
)


@dataclass(frozen=True)
class Piece:
    """A file of a wheel, or SHARD_BYTES of it from `start`; start None: all of it."""

    wheel: Path
    name: str
    start: int | None
    size: int

    @property
    def member(self) -> str:
        """Name in a shard: NAME, or NAME@@START."""
        return self.name if self.start is None else f"{self.name}@@{self.start}"


@dataclass(frozen=True)
class Options:
    """arch: compute capability whose code stays. fa3: head sizes, none to leave FlashAttention 3 out."""

    arch: int
    fa3: frozenset[int]
    preset: int = 4


def main() -> int:
    args = _parse_arguments()
    options = Options(args.arch, frozenset(args.fa3), args.preset)
    wheels = download(args.wheels or args.out.with_name(args.out.name + ".wheels"), args.python)
    shutil.rmtree(args.out, ignore_errors=True)
    packed = args.out / "shards"
    packed.mkdir(parents=True)
    jobs = [
        (pieces, packed / f"shard-{number:03d}.tar.xz", options)
        for number, pieces in enumerate(plan_shards(wheels, options))
    ]
    with concurrent.futures.ProcessPoolExecutor(args.jobs) as pool:
        files = list(pool.map(_pack, *zip(*jobs)))
    folders = write_parts(files, args.out, int(args.part_mib * MIB))
    packed.rmdir()
    total = sum(file.stat().st_size for folder in folders for file in folder.iterdir())
    print(f"{len(folders)} parts, {total / MIB:.0f} MiB: {args.out}")
    return 0


def download(folder: Path, python: str) -> list[Path]:
    """Download the pinned wheels that are missing in `folder`; return all, in the order of wheels.txt."""
    folder.mkdir(parents=True, exist_ok=True)
    pins = WHEELS.read_text().split()
    missing = [pin for pin in pins if find_wheel(folder, pin) is None]
    if missing:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--python-version", python, "--implementation", "cp", "--dest", str(folder)]
        tags = [f"manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)]
        for tag in (*tags, "manylinux2014_x86_64", "manylinux1_x86_64"):
            command += ["--platform", tag]
        subprocess.run([*command, *missing], check=True)
    found = [find_wheel(folder, pin) for pin in pins]
    if lost := [pin for pin, wheel in zip(pins, found) if wheel is None]:
        raise FileNotFoundError(f"no wheel for {', '.join(lost)}")
    return [wheel for wheel in found if wheel is not None]


def find_wheel(folder: Path, pin: str) -> Path | None:
    name, version = pin.split("==")
    for file in folder.glob("*.whl"):
        found, found_version, *_ = file.name.split("-")
        if _same(found, name) and found_version == version:
            return file
    return None


def _same(name: str, other: str) -> bool:
    first, second = (text.lower().replace("-", "_").replace(".", "_") for text in (name, other))
    return first == second


def is_dropped(name: str, options: Options) -> bool:
    without_fa3 = name == FA3_LIBRARY and not options.fa3
    return without_fa3 or any(fnmatch.fnmatchcase(name, pattern) for pattern in DROPPED)


def plan_shards(wheels: list[Path], options: Options) -> list[list[Piece]]:
    """Distribute the wheels' files; a large one gets shards of its own. The first of a name wins."""
    large, shards, room, taken = [], [[]], SHARD_BYTES, set()
    for wheel in wheels:
        for info in zipfile.ZipFile(wheel).infolist():
            name, size = info.filename, info.file_size
            if name.endswith("/") or name in taken or is_dropped(name, options):
                continue
            taken.add(name)
            if size > SHARD_BYTES:
                starts = range(0, size, SHARD_BYTES)
                large += [[Piece(wheel, name, start, min(SHARD_BYTES, size - start))] for start in starts]
                continue
            if size > room:
                shards.append([])
                room = SHARD_BYTES
            shards[-1].append(Piece(wheel, name, None, size))
            room -= size
    return large + [shard for shard in shards if shard]


_latest: dict[str, bytes | bytearray] = {}  # the large file that this process has read last


def _read(wheel: zipfile.ZipFile, name: str, options: Options) -> bytes | bytearray:
    if name in _latest:
        return _latest[name]
    keep = is_fa3_needed(options.fa3) if name == FA3_LIBRARY else None
    data = thin(wheel.read(name), options.arch, keep)
    if len(data) > SHARD_BYTES:
        _latest.clear()
        _latest[name] = data
    return data


def _pack(pieces: list[Piece], path: Path, options: Options) -> Path:
    """Write a shard. Machine code is filtered for x86, which packs it better."""
    tar, code_bytes, opened = io.BytesIO(), 0, {}
    with tarfile.open(fileobj=tar, mode="w") as out:
        for piece in pieces:
            wheel = opened.setdefault(piece.wheel, zipfile.ZipFile(piece.wheel))
            data = _read(wheel, piece.name, options)
            is_code = data[: len(ELF64)] == ELF64
            if piece.start is not None:
                data = data[piece.start : piece.start + piece.size]
            code_bytes += len(data) if is_code else 0
            info = tarfile.TarInfo(piece.member)
            info.size = len(data)
            info.mode = 0o755 if (wheel.getinfo(piece.name).external_attr >> 16) & 0o111 else 0o644
            out.addfile(info, io.BytesIO(data))
    filters = [{"id": lzma.FILTER_LZMA2, "preset": options.preset, "dict_size": 32 * MIB}]
    if 2 * code_bytes > tar.tell():
        filters.insert(0, {"id": lzma.FILTER_X86})
    path.write_bytes(lzma.compress(tar.getbuffer(), format=lzma.FORMAT_XZ, filters=filters))
    return path


def write_parts(files: list[Path], out: Path, limit: int) -> list[Path]:
    """Move shards to folders of at most `limit` bytes, largest first; each folder gets the manifest."""
    by_size = sorted(files, key=lambda file: -file.stat().st_size)
    manifest = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(files)}
    text = json.dumps({"wheels": WHEELS.read_text().split(), "shards": manifest}, indent=1)
    if too_large := [file.name for file in by_size if file.stat().st_size + len(text) > limit]:
        raise ValueError(f"larger than a part: {', '.join(too_large)}; use a larger --part-mib")
    rooms: list[int] = []
    folders: list[Path] = []
    for file in by_size:
        size = file.stat().st_size
        index = next((i for i, room in enumerate(rooms) if room >= size), len(rooms))
        if index == len(rooms):
            rooms.append(limit - len(text))
            folders.append(out / f"part-{index + 1}")
            folders[-1].mkdir()
            (folders[-1] / "manifest.json").write_text(text)
        rooms[index] -= size
        os.replace(file, folders[index] / file.name)
    return folders


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--wheels", type=Path, help="where wheels are kept; default: OUT.wheels")
    parser.add_argument("--python", default="3.12", help="the GPU machine's")
    parser.add_argument("--arch", type=int, default=90, help="compute capability whose GPU code stays")
    parser.add_argument(
        "--fa3",
        type=int,
        nargs="*",
        default=[64, 128, 256],
        help="head sizes whose kernels stay; none: no FA3",
    )
    parser.add_argument("--part-mib", type=float, default=56, help="size of a part")
    parser.add_argument("--preset", type=int, default=4, help="of xz; 1 is faster and 8 %% larger")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
