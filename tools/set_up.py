"""The environment of this checkout: `make` runs this before anything else.

    python tools/set_up.py VENV --sglang VERSION [--extras NAME ...] [--override ONE ...] [--model FOLDER]

uv installs, as pip's resolver takes minutes on one core. It gets the indexes, files, constraints and
certificates that pip is configured with, as it reads none of these. If uv cannot be had, pip installs alone.
The model's wheel is downloaded meanwhile. What is there already is kept, so a second call goes on.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UV = "uv>=0.9,<1"
OLDEST_PYTHON = (3, 11)
# pip's settings, and the variables by which uv is told. uv separates files by commas.
SETTINGS = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "constraint": ("UV_CONSTRAINT", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", " "),
    "timeout": ("UV_HTTP_TIMEOUT", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "proxy": ("ALL_PROXY", " "),
}
# Prints the requirements that the environment lacks. The first word of each is a name.
MISSING = """
import sys
from importlib.metadata import PackageNotFoundError, version

from packaging.requirements import Requirement

for text in sys.argv[1:]:
    one = Requirement(text)
    try:
        is_wanted = one.marker is None or one.marker.evaluate()
        if is_wanted and not one.specifier.contains(version(one.name), prereleases=True):
            print(text)
    except PackageNotFoundError:
        print(text)
"""


class SetUpError(Exception):
    """The reason and what to do, as one line."""


def pip_settings(python: Path) -> dict[str, str]:
    """Return the settings of pip's files and environment, the environment's last."""
    command = [str(python), "-m", "pip", "config", "list"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    pairs = [line.partition("=") for line in found.splitlines() if "=" in line]
    order = ["global", "install", ":env:"]
    pairs = [(*key.rpartition(".")[::2], ast.literal_eval(value)) for key, _, value in pairs]
    known = [pair for pair in pairs if pair[0] in order]
    return {name: value for _, name, value in sorted(known, key=lambda pair: order.index(pair[0]))}


def uv_environment(settings: dict[str, str]) -> dict[str, str]:
    """Return uv's environment: what pip is configured with, unless a variable of uv's is set."""
    given = {}
    for name, value in settings.items():
        if name in SETTINGS:
            variable, separator = SETTINGS[name]
            given[variable] = separator.join(value.split())
    # As pip: the best version of all indexes, not of the first that has the name.
    return {"UV_INDEX_STRATEGY": "unsafe-best-match", **given, **os.environ}


def install_uv(python: Path) -> bool:
    """Install uv by pip, only from a wheel. Returns whether it is there."""
    flags = "--quiet --disable-pip-version-check --only-binary=:all: --retries=2".split()
    return subprocess.run([str(python), "-m", "pip", "install", *flags, UV], check=False).returncode == 0


def requirements(extras: list[str]) -> list[str]:
    """Return the requirements of the package and of these extras of it."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project["dependencies"] + [
        one for extra in extras for one in project["optional-dependencies"][extra]
    ]


def is_complete(venv: Path, wanted: list[str]) -> bool:
    """Return whether a finished environment holds all requirements."""
    ready = venv / ".ready"
    if not ready.exists() or ready.stat().st_mtime < (ROOT / "pyproject.toml").stat().st_mtime:
        return False
    command = [str(venv / "bin" / "python"), "-c", MISSING, *wanted]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.returncode == 0 and not found.stdout.strip()


def set_up(venv: Path, sglang: str, extras: list[str], overrides: list[str], model: Path | None) -> None:
    """Make the environment, or add what it lacks.

    Args:
        venv: the environment's folder.
        sglang: the version of SGLang.
        extras: of pyproject.toml, beside `model`.
        overrides: requirements that replace others of the same name.
        model: folder that `models/fetch_smollm2.py` makes; its wheel is downloaded meanwhile. None: no.

    Raises:
        SetUpError: with the reason, and what to do.
    """
    extras = ["model", *extras]
    if not is_complete(venv, [*requirements(extras), f"sglang=={sglang}"]):
        start = time.monotonic()
        text = f"Setting up {venv}: SGLang and its dependencies, about 10 GB, a few minutes."
        print(text, flush=True)
        python = make_venv(venv)
        fetching = start_download(python, model)
        try:
            install(python, venv, [f".[{','.join(extras)}]", f"sglang=={sglang}"], overrides)
            if fetching:
                fetching.wait()
        finally:
            if fetching:
                fetching.terminate()
        print(f"{venv} is ready after {time.monotonic() - start:.0f} s.", flush=True)
    for extra in extras:
        (venv / f".ready-{extra}").touch()
    (venv / ".ready").touch()


def make_venv(venv: Path) -> Path:
    """Make the environment unless it is there. Returns its Python."""
    python = venv / "bin" / "python"
    if python.exists() and not subprocess.run([python, "-c", "import pip"], capture_output=True).returncode:
        return python
    command = [sys.executable, "-m", "venv", str(venv)]
    if subprocess.run(command, check=False).returncode:
        raise SetUpError("Python's venv module fails: see the messages above")
    return python


def start_download(python: Path, model: Path | None) -> subprocess.Popen | None:
    """Begin the download of the model's wheel, unless the model is there.

    Its errors are not shown, as `make model` asks again.
    """
    if model is None or model.is_dir():
        return None
    command = [str(python), str(ROOT / "models" / "fetch_smollm2.py"), str(model), "--download-only"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def install(python: Path, venv: Path, wanted: list[str], overrides: list[str]) -> None:
    """Install the package, editable, and SGLang. Raises SetUpError."""
    if install_uv(python):
        settings = pip_settings(python)
        command = [str(venv / "bin" / "uv"), "pip", "install", "--python", str(python)]
        if overrides:
            file = venv / "overrides.txt"
            file.write_text("".join(f"{one}\n" for one in overrides))
            command += ["--override", str(file)]
        command += ["--no-index"] * (settings.get("no-index", "").lower() in ("1", "true", "yes", "on"))
        environment = uv_environment(settings)
    elif overrides:
        raise SetUpError("OVERRIDE needs uv, which pip cannot install: see the messages above")
    else:
        print("pip installs alone, in some minutes more, because it cannot install uv.", flush=True)
        command = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
        environment = {**os.environ}
    if subprocess.run([*command, "--editable", *wanted], env=environment, check=False).returncode:
        raise SetUpError("see the messages above. The same command goes on with what is there")


def main(arguments: list[str] | None = None) -> int:
    """Return the exit status: 0, 1 if the environment cannot be had, 130 if interrupted."""
    if sys.version_info < OLDEST_PYTHON:
        version = ".".join(map(str, sys.version_info[:2]))
        print(f"sglang-dflash needs Python 3.11 or newer, this is {version}; give one with make PYTHON=...")
        return 1
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("venv", type=Path)
    parser.add_argument("--sglang", required=True)
    parser.add_argument("--extras", nargs="*", default=[])
    parser.add_argument("--override", nargs="*", default=[])
    parser.add_argument("--model", type=Path)
    args = parser.parse_args(arguments)
    os.chdir(ROOT)
    try:
        set_up(args.venv, args.sglang, args.extras, args.override, args.model)
    except (SetUpError, OSError) as error:
        print(f"{args.venv} is not ready: {error}.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{args.venv} is not ready: interrupted. The same command goes on.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
