"""Packs for a GPU machine without a network: what they keep, and that they arrive whole."""

import hashlib
import json
import random
import struct
import sys
import zipfile
from pathlib import Path

import pytest
from gpu.offline import caches, fatbin, pack, unpack

FORWARD = (
    "_ZN5flash24CollectiveMainloopFwdSm90ILi2EN4cute5tupleELi{size}ENS_{kind}EfNS_4arch4Sm90E"
    "Lb1ELb0E{soft_cap}Lb1ELb0E"
)
BF16, HALF = "10bfloat16_t", "6half_t"


def kernel(size: int, kind: str = BF16, soft_cap: bool = False) -> bytes:
    return FORWARD.format(size=size, kind=kind, soft_cap=f"Lb{soft_cap:d}E").encode() + bytes(40)


def container(*entries: tuple[int, int, bytes]) -> bytes:
    """Return a container of GPU code. entries: (kind, compute capability, code)."""
    body = b""
    for kind, arch, code in entries:
        code += bytes(-len(code) % 8)
        body += struct.pack("<HHIQ", kind, 0, 64, len(code)) + bytes(12) + struct.pack("<I", arch)
        body += bytes(64 - 32) + code
    return fatbin.CONTAINER + struct.pack("<HHQ", 1, 16, len(body)) + body


def elf(sections: dict[str, tuple[int, bytes]]) -> bytes:
    """Return an ELF file. sections: name -> (flags, bytes)."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name in (*sections, ".shstrtab"))
    offset, headers, body = 64, [bytes(64)], b""
    for name, (flags, data) in {**sections, ".shstrtab": (0, names)}.items():
        at = names.index(b"\0" + name.encode() + b"\0") + 1
        headers.append(struct.pack("<IIQQQQ", at, 1, flags, 0, offset + len(body), len(data)) + bytes(24))
        body += data
    start = struct.pack("<QQ", 0, 64 + len(body))
    head = (
        fatbin.ELF64 + bytes(27) + start + bytes(60 - 48) + struct.pack("<HH", len(headers), len(headers) - 1)
    )
    assert len(head) == 64
    return head + body + b"".join(headers)


def test_only_one_gpus_code_stays():
    ours, other, ptx = b"a" * 64, b"b" * 64, b"c" * 64
    both, without = (
        container((1, 90, ptx), (2, 80, other), (2, 90, ours)),
        container((1, 90, ptx), (2, 80, other)),
    )
    data = elf({".text": (2, b"code" * 8), ".nv_fatbin": (2, both + without), ".debug_info": (0, b"d" * 64)})
    thinned = bytes(fatbin.thin(data, 90))
    assert len(thinned) == len(data) and thinned.count(b"code") == 8
    assert (ours in thinned, b"d" * 64 in thinned) == (True, False)
    start = data.index(fatbin.CONTAINER)
    kept = list(fatbin._entries(bytearray(thinned), start + 16, start + 16 + 64 + 64))
    assert [(arch, thinned[code:end]) for _, end, code, arch in kept] == [(90, ours)]
    assert thinned[start + len(both) :].startswith(without)  # nothing for this GPU: it may need the rest
    assert fatbin.thin(b"no library", 90) == b"no library"


def test_fa3_kernels_are_chosen_by_name():
    keep = fatbin.is_fa3_needed(frozenset({64, 128}))
    assert keep(kernel(64)) and keep(kernel(128)) and keep(b"x FlashAttnFwdCombine x")
    assert keep(b"_ZN5flash32prepare_varlen_num_blocks_kernelILi16E")
    assert not keep(kernel(256)) and not keep(kernel(64, HALF)) and not keep(kernel(64, soft_cap=True))
    assert not keep(b"_ZN7cutlass13device_kernelIN5flash")
    assert keep(kernel(256) + kernel(128))  # one of two in a file
    containers = [container((2, 90, kernel(size))) for size in (64, 256)]
    thinned = fatbin.thin(elf({".nv_fatbin": (2, b"".join(containers))}), 90, keep)
    assert kernel(64) in thinned and kernel(256) not in thinned


@pytest.fixture
def wheels(tmp_path, monkeypatch) -> list[Path]:
    """Two wheels, with a library too large for a shard."""
    monkeypatch.setattr(pack, "SHARD_BYTES", 10_000)
    noise = random.Random(1)
    code = container((2, 90, noise.randbytes(23_000)), (2, 80, noise.randbytes(9000)))
    files = {
        "one-1.0-py3-none-any.whl": {
            "torch/lib/x.so": elf({".nv_fatbin": (2, code)}),
            "torch/a.py": b"a = 1\n",
        },
        "two-1.0-py3-none-any.whl": {
            "torch/a.py": b"another\n",
            "triton/b.txt": noise.randbytes(9000),
            "triton/c.txt": noise.randbytes(9000),
            "torch/include/x.h": b"dropped",
            pack.FA3_LIBRARY: b"fa3",
        },
    }
    for name, members in files.items():
        with zipfile.ZipFile(tmp_path / name, "w") as out:
            for member, data in members.items():
                out.writestr(member, data)
    return [tmp_path / name for name in files]


def make_parts(wheels: list[Path], out: Path, options: pack.Options) -> list[Path]:
    out.mkdir()
    (out / "shards").mkdir()
    shards = pack.plan_shards(wheels, options)
    files = [
        pack._pack(pieces, out / "shards" / f"shard-{i:03d}.tar.xz", options)
        for i, pieces in enumerate(shards)
    ]
    return pack.write_parts(files, out, 16_000)


def test_a_pack_arrives_whole_in_any_order(wheels, tmp_path, capsys, monkeypatch):
    options = pack.Options(arch=90, fa3=frozenset())
    parts = make_parts(wheels, tmp_path / "out", options)
    assert len(parts) > 2
    assert all(sum(file.stat().st_size for file in part.iterdir()) <= 16_000 for part in parts)
    root = tmp_path / "root"
    for number, part in enumerate([*reversed(parts[1:]), parts[1], parts[0]]):  # one of them twice
        monkeypatch.setattr(sys, "argv", ["unpack.py", str(part), "--root", str(root)])
        is_last = number == len(parts)
        assert unpack.main() == (unpack.READY if is_last else unpack.INCOMPLETE)
    site = root / "site"
    library = zipfile.ZipFile(wheels[0]).read("torch/lib/x.so")
    assert (site / "torch/lib/x.so").read_bytes() == bytes(fatbin.thin(library, 90))
    assert (site / "torch/a.py").read_text() == "a = 1\n"  # the first wheel's
    assert not (site / "torch/include").exists() and not (site / pack.FA3_LIBRARY).exists()
    packed = zipfile.ZipFile(wheels[1])
    assert (site / "triton/b.txt").read_bytes() == packed.read("triton/b.txt")
    assert f"PYTHONPATH={site} " in (root / "env.sh").read_text()


def test_fa3_is_packed_if_a_head_size_is_requested(wheels):
    names = {
        bool(sizes): {
            piece.name for shard in pack.plan_shards(wheels, pack.Options(90, sizes)) for piece in shard
        }
        for sizes in (frozenset(), frozenset({64}))
    }
    assert names[True] - names[False] == {pack.FA3_LIBRARY}


def test_a_damaged_shard_is_not_installed(wheels, tmp_path, capsys, monkeypatch):
    part = make_parts(wheels, tmp_path / "out", pack.Options(90, frozenset()))[0]
    shard = next(part.glob("*.xz"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    monkeypatch.setattr(sys, "argv", ["unpack.py", str(part), "--root", str(tmp_path / "root")])
    assert unpack.main() == unpack.DAMAGED and shard.name in capsys.readouterr().err
    manifest = json.loads((part / "manifest.json").read_text())["shards"]
    digest = hashlib.sha256(shard.read_bytes()).hexdigest()
    assert manifest[shard.name] != digest and not list((tmp_path / "root" / "done").iterdir())


def test_a_part_that_is_too_small_for_a_shard_is_refused(tmp_path):
    file = tmp_path / "shard-000.tar.xz"
    file.write_bytes(bytes(5000))
    with pytest.raises(ValueError, match="shard-000.*--part-mib"):
        pack.write_parts([file], tmp_path, 4000)


def test_a_wheel_is_found_by_its_pin(tmp_path):
    wheel = tmp_path / "Flash_Infer.Python-0.7.2-py3-none-any.whl"
    wheel.touch()
    assert pack.find_wheel(tmp_path, "flash-infer-python==0.7.2") == wheel
    assert pack.find_wheel(tmp_path, "flash-infer-python==0.7.3") is None
    pins = pack.WHEELS.read_text().split()
    assert all(pin.count("==") == 1 for pin in pins) and "sglang==0.5.23" in pins


def test_caches_travel_in_pieces(tmp_path):
    home, there, folder = tmp_path / "home", tmp_path / "there", tmp_path / "pieces"
    kernel_file = home / caches.CACHES[0] / "90a" / "kernel.so"
    kernel_file.parent.mkdir(parents=True)
    kernel_file.write_bytes(random.Random(1).randbytes(20_000))
    assert caches.save(folder, home, piece_bytes=8000) == 3
    assert max(piece.stat().st_size for piece in folder.iterdir()) == 8000
    caches.load(folder, there)
    assert (there / caches.CACHES[0] / "90a" / "kernel.so").read_bytes() == kernel_file.read_bytes()
    assert caches.save(folder, tmp_path / "nobody") == 1 and len(list(folder.iterdir())) == 1
