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
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UV = "uv>=0.9,<1"
OLDEST_PYTHON = (3, 11)
NEEDED_GB = 10
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
# Words of pip's and uv's messages, and what to do.
CAUSES = (
    (
        r"No space left|os error 28",
        "no space left on the disk. It takes about {needed} GB, of which {free:.1f} GB are free now",
    ),
    (
        # Before the connection: a build that downloads for itself has the same words in its output.
        r"The build backend returned an error|Failed building wheel|Failed to build installable wheels",
        "a package that the index has as source alone cannot be built. OVERRIDE=NAME==VERSION replaces it",
    ),
    (
        r"NewConnectionError|onnection refused|dns error|Name or service|unreachable|timed out|ProxyError"
        r"|tunnel error|client error \(Connect\)",
        "no connection to the package index. Behind a proxy set HTTPS_PROXY; a mirror is PIP_INDEX_URL",
    ),
    (
        r"IncompleteRead|Connection broken|Connection aborted|onnection reset|end of file|early eof"
        r"|unexpected EOF|request or response body|decoding response body|error sending request"
        r"|Failed to (read from zip|extract)|closed before message|Wheel .* is invalid",
        "the download broke off. The same command goes on with what is there",
    ),
    (
        r"No solution found|unsatisfiable|ResolutionImpossible|No matching distribution",
        "the package index lacks something. OVERRIDE=NAME==VERSION replaces a requirement",
    ),
)
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


def cause_of(output: str, venv: Path) -> str:
    """Return why an installation failed and what to do, as one line."""
    for words, cause in CAUSES:
        if re.search(words, output, re.IGNORECASE):
            free = shutil.disk_usage(venv.parent).free / 1e9
            return cause.format(venv=venv, needed=NEEDED_GB, free=free)
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"


def run(command: list[str], log: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Run an installation. Returns its exit status and its output, which on a terminal is empty."""
    if sys.stderr.isatty():  # uv's bars
        return subprocess.run(command, env=environment, check=False).returncode, ""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as child, log.open("a") as file:
        lines = []
        for line in child.stdout:
            if not line.startswith((" + ", " - ")):  # a line for each package
                print(f"  {line}", end="", flush=True)
            file.write(line)
            lines.append(line)
    return child.returncode, "".join(lines)


def install_uv(python: Path, settings: dict[str, str]) -> str | None:
    """Install uv by pip, only from a wheel. Returns why it cannot be had, or None.

    Raises:
        SetUpError: It failed otherwise, as pip alone would too.
    """
    flags = "--quiet --disable-pip-version-check --only-binary=:all: --retries=2".split()
    command = [str(python), "-m", "pip", "install", *flags, UV]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    cause = cause_of(done.stderr, python.parent.parent)
    if not cause.startswith("the package index lacks"):
        raise SetUpError(cause)
    return "the package index has no wheel of uv for this machine"


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
        text = f"Setting up {venv}: SGLang and its dependencies, about {NEEDED_GB} GB, a few minutes."
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
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    if done.returncode and "ensurepip" in output:
        raise SetUpError("Python's venv module is not complete; Debian has it as python3-venv")
    if done.returncode:
        raise SetUpError(cause_of(output, venv))
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
    settings, log = pip_settings(python), venv / "set-up.log"
    without_uv = install_uv(python, settings)
    if without_uv is None:
        command = [str(venv / "bin" / "uv"), "pip", "install", "--python", str(python)]
        if overrides:
            file = venv / "overrides.txt"
            file.write_text("".join(f"{one}\n" for one in overrides))
            command += ["--override", str(file)]
        command += ["--no-index"] * (settings.get("no-index", "").lower() in ("1", "true", "yes", "on"))
        environment = uv_environment(settings)
    elif overrides:
        raise SetUpError(f"OVERRIDE needs uv, and {without_uv}")
    else:
        print(f"pip installs alone, in some minutes more: {without_uv}.", flush=True)
        command = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
        environment = {**os.environ}
    status, output = run([*command, "--editable", *wanted], log, environment)
    if status:
        shown = f" ({log} has all messages)" if output else ""
        seen = "see the messages above. The same command goes on with what is there"
        raise SetUpError((cause_of(output, venv) if output else seen) + shown)


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
        reason = cause_of(str(error), args.venv.absolute()) if isinstance(error, OSError) else error
        print(f"{args.venv} is not ready: {str(reason).rstrip('.')}.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{args.venv} is not ready: interrupted. The same command goes on.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
