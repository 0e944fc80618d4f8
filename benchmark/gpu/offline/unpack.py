"""Install a pack on a machine with a GPU and without a network.

    python3 benchmark/gpu/offline/unpack.py PART [--root ~/gpu-env]

PART is one of the folders that pack.py made. Bring them one after the other, in any order; a part brought
twice does no harm. The last one completes ROOT/site and writes ROOT/env.sh, for every later command:

    . ~/gpu-env/env.sh

Run this with the python3 that will run SGLang: its CUDA libraries are linked into the site.

Exit status: 0 ready, 3 shards are still missing, 1 a shard is damaged.
"""

import argparse
import concurrent.futures
import glob
import hashlib
import json
import lzma
import os
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

READY, DAMAGED, INCOMPLETE = 0, 1, 3
# CUDA's libraries that the installed torch brings.
CUDA_LIBRARIES = ("cu13", "cudnn", "cusparselt", "nccl", "nvshmem")
DRIVER_FOLDERS = (
    "/usr/local/nvidia/lib64",
    "/usr/local/nvidia/lib",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
)


def main() -> int:
    args = _parse_arguments()
    root = args.root.expanduser().absolute()
    manifest = json.loads((args.part / "manifest.json").read_text())["shards"]
    site, done = root / "site", root / "done"
    for folder in (site, done):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        missing = install(args.part, manifest, site, done)
    except ValueError as error:
        print(error, file=sys.stderr)
        return DAMAGED
    print(f"{len(manifest) - len(missing)} of {len(manifest)} shards installed")
    if missing:
        return INCOMPLETE
    line = link_cuda(root, site)
    (root / "env.sh").write_text(line + "\n")
    print(f"ready: . {root}/env.sh")
    return READY


def install(part: Path, manifest: dict[str, str], site: Path, done: Path) -> list[str]:
    """Extract the part's shards that are not installed yet; return the names of those still missing.

    Raises ValueError for a shard that is not the manifest's.
    """
    wanted = {name: digest for name, digest in manifest.items() if not (done / digest).exists()}
    here = [name for name in wanted if (part / name).exists()]
    for name in here:
        if hashlib.sha256((part / name).read_bytes()).hexdigest() != wanted[name]:
            raise ValueError(f"{name} is damaged or of another pack")
    with concurrent.futures.ProcessPoolExecutor() as pool:
        for name in pool.map(extract, [part / name for name in here], [site] * len(here)):
            (done / wanted[name]).touch()
    return [name for name in wanted if name not in here]


def extract(shard: Path, site: Path) -> str:
    """Extract a shard; a member NAME@@N is written into NAME from byte N on. Returns the shard's name."""
    with lzma.open(shard) as raw, tarfile.open(fileobj=raw, mode="r|") as members:
        for member in members:
            name, _, start = member.name.partition("@@")
            path = (site / name).resolve()
            if not path.is_relative_to(site.resolve()):
                raise ValueError(f"{member.name} is outside the site")
            path.parent.mkdir(parents=True, exist_ok=True)
            data = members.extractfile(member)
            assert data is not None, f"{member.name} is no file"
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, member.mode), "wb") as out:
                out.seek(int(start or 0))
                out.write(data.read())
    return shard.name


def link_cuda(root: Path, site: Path) -> str:
    """Link the installed torch's CUDA libraries into the site; return the line of env.sh.

    torch looks for site/nvidia/NAME/lib. Kernels that are compiled at run time need headers, and libraries
    under plain names, which neither wheels nor drivers have.
    """
    ours, plain = site / "nvidia", root / "link"
    for folder in (ours, plain):
        folder.mkdir(parents=True, exist_ok=True)
    for base in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for folder in sorted(Path(base, "nvidia").glob("*/")):
            if (folder / "lib").is_dir() and not (ours / folder.name).exists():
                (ours / folder.name).symlink_to(folder)
    if lost := [name for name in CUDA_LIBRARIES if not (ours / name / "lib").is_dir()]:
        print(f"WARNING: no {', '.join(lost)} beside the installed torch; ours may not load", file=sys.stderr)
    libraries = [Path(path) for path in sorted(glob.glob(f"{ours}/*/lib/lib*.so.*"))]
    if driver := _driver():
        libraries.append(driver)
    else:
        print("WARNING: no libcuda.so.1, the GPU's driver", file=sys.stderr)
    for library in libraries:
        link = plain / (library.name.split(".so.")[0] + ".so")
        if not link.exists():
            link.symlink_to(library)
    cccl = site / "flashinfer" / "data" / "cccl"
    headers = [Path(path) for path in glob.glob(f"{ours}/*/include")]
    headers += [cccl / name for name in ("libcudacxx/include", "cub", "thrust")]
    shown = ":".join(str(folder) for folder in headers if folder.is_dir())
    cuda = os.environ.get("CUDA_HOME") or next(iter(sorted(glob.glob("/usr/local/cuda*"))), "/usr/local/cuda")
    return (
        f"export PYTHONPATH={site} CUDA_HOME={cuda} PATH={Path(sys.executable).parent}:{cuda}/bin:$PATH "
        f"CPLUS_INCLUDE_PATH={shown} LIBRARY_PATH={plain} PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK=1"
    )


def _driver() -> Path | None:
    folders = [*os.environ.get("LD_LIBRARY_PATH", "").split(":"), *DRIVER_FOLDERS]
    known = [Path(folder) / "libcuda.so.1" for folder in folders if folder]
    table = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True).stdout.split()
    known += [Path(word) for word in table if word.endswith("/libcuda.so.1")]
    return next((path for path in known if path.exists()), None)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", type=Path)
    parser.add_argument("--root", type=Path, default=Path("~/gpu-env"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
