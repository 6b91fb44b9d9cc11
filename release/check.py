"""Check a release: ``make release-check``.

1. sdist and wheel are built twice from the last commit, under other conditions (umask, time zone), and are equal byte
   by byte;
2. the wheel alone, with the packages that it asks for, is installed into an empty environment;
3. every command runs there, or says which extra it needs; with these extras every command runs, and the shipped
   studies are there;
4. ``import vkernel`` takes at most 1.3 times as long as ``import torch``;
5. the versions in the package, CHANGELOG.md and CITATION.cff are the same.

The archives that passed are left in dist/."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SLOWEST = 1.3  # of the time of import torch
REPEATS = 7
NETWORK = """
import torch
torch.manual_seed(0)
images = torch.rand(40, 1, 8, 8) * 2 - 1
import numpy as np
np.save("train.npy", images[:24].numpy())
np.save("test.npy", images[24:].numpy())
net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.Unflatten(1, (1, 8, 8)))
open("network.py", "w").write('''import torch
def make():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(64, 64)
        def forward(self, x, t):
            return self.layer(x.flatten(1)).reshape(x.shape)
    return Net()
''')
import sys
sys.path.insert(0, ".")
import network
from safetensors.torch import save_file
net = network.make()
save_file(net.state_dict(), "weights.safetensors")
import vkernel as vk
with vk.Monitor(images[:24], vk.VP(), images[24:], every=1, budget=1.0, log="run", images=8, samples=4) as monitor:
    monitor(0, net)
    monitor.evaluate(5, net)
ensemble = vk.train_ensemble(vk.models.MLP(8, 1, steps=5), images[:24], vk.VP(), members=2)
ensemble.save("ensemble")
"""
SPEC = """
title = "Small"
question = "Does a study run?"
seed = 0
members = 4
block = 2
[data]
points = [-1.0, 0.0, 1.0]
[process]
kind = "vp"
eps = 1e-3
[model]
kind = "linear"
features = "gaussian"
per_axis = 8
[training]
F_over_P = 1.0
[sampler]
samples = 16
steps = 10
[measure]
gap = [0.25, 0.75]
[grid."training.F_over_P"]
values = [0.5, 1.0]
"""
QUICK_PAGE = "import vkernel as vk; vk.reproduce.run('quick', quick=True, workers=2)"
STUDY = "pip install 'vkernel[study]'"
COMMANDS = {  # arguments, exit code, and what the answer holds; an exit code of 2 is a refusal
    "--version": (0, "0."),
    "--help": (0, "profile"),
    "profile toy:triple --html profile.html --json profile.json": (0, "noise"),
    "monitor run --html monitor.html": (0, "learning"),
    "audit weights.safetensors --module network.py:make --predicts x0 --time t --betas vp --data train.npy"
    " --test test.npy --quick --samples 16 --html audit.html": (0, ""),
    "study list": (2, STUDY),
    "study run small.toml --store store": (2, STUDY),
    "study status store": (2, STUDY),
    "study show store": (2, STUDY),
    "study report store": (2, STUDY),
    "study plot store": (2, STUDY),
    "study export store --out study.nc": (2, STUDY),
    "reproduce --out out": (2, STUDY),
    "explore --no-open": (2, "pip install 'vkernel[explore]'"),
}
EXTRAS = ("study", "netcdf", "explore")
WITH_EXTRAS = {
    "study list": (0, "target_noise:"),
    "study run small.toml --store store": (0, "results are in store"),
    "study status store": (0, "4 of 4 members"),
    "study show store": (0, ""),
    "study report store": (2, ""),  # a study of networks is wanted
    "study plot store": (0, "wrote study.png"),
    "study export store --out study.nc": (0, "wrote study.nc"),
}


def build(into: Path, umask: int, zone: str) -> list[Path]:
    """Build sdist and wheel, the wheel from the sdist, of what is committed."""
    tree, dist = into / "tree", into / "dist"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(tree)], check=True, umask=umask)
    command = [sys.executable, "-m", "build", "-q", "--outdir", str(dist), str(tree)]
    subprocess.run(command, check=True, umask=umask, env=os.environ | {"TZ": zone})
    return sorted(dist.iterdir())


def hashes(files: Iterable[Path]) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def install(wheel: Path, into: Path, extras: Iterable[str] = ()) -> Path:
    """Install the wheel and what it asks for, into an empty environment unless there is one; return its programs."""
    programs = into / "bin"
    if not into.exists():
        venv.create(into, with_pip=True)
    pip = [
        str(programs / "pip"),
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "-c",
        str(ROOT / "constraints.txt"),
    ]
    subprocess.run([*pip, "torch"], check=True)
    subprocess.run([*pip, f"{wheel}[{','.join(extras)}]" if extras else str(wheel)], check=True)
    subprocess.run([str(programs / "pip"), "check"], check=True)
    return programs


def commands(programs: Path, folder: Path, table: dict[str, tuple[int, str]]) -> list[str]:
    """Run the commands of a table; return what is wrong."""
    wrong = []
    for line, (code, text) in table.items():
        done = subprocess.run(
            [str(programs / "vkernel"), *line.split()], cwd=folder, capture_output=True, text=True, timeout=600
        )
        said = done.stdout + done.stderr
        good = done.returncode == code and text in " ".join(said.split()) and "Traceback" not in said
        print(f"{'ok  ' if good else 'FAIL'} vkernel {line}", flush=True)
        if not good:
            wrong.append(f"vkernel {line}: exit code {done.returncode}, not {code}, or no {text!r} in: {said[-800:]}")
    return wrong


def names(command: Any) -> list[str]:
    """Return the commands of a command line as one types them, "study run" for one."""
    found = getattr(command, "commands", {})
    return [f"{name} {rest}".strip() for name in found for rest in names(found[name])] or [""]


def not_listed(found: list[str]) -> list[str]:
    """Return which commands of ``found`` are not run with the core dependencies, or nowhere where they work."""
    works = [*WITH_EXTRAS, "reproduce", "explore", *(line for line, (code, _) in COMMANDS.items() if code == 0)]
    return [
        f"vkernel {name} is not checked {where}"
        for name in found
        for where, lines in (("without extras", COMMANDS), ("where it works", works))
        if not any(f"{line} ".startswith(f"{name} ") for line in lines)
    ]


def shipped(programs: Path, folder: Path) -> list[str]:
    """Return the studies of the repository that the installed package does not list."""
    said = subprocess.check_output([str(programs / "vkernel"), "study", "list"], text=True, cwd=folder)
    files = sorted((ROOT / "src/vkernel/study/shipped").glob("*.toml"))
    return [f"the study {file.stem} is not in the wheel" for file in files if f"{file.stem}:" not in said]


def reproduce(programs: Path, folder: Path) -> list[str]:
    """Make the exhibits in a coarse form; return what is wrong."""
    done = subprocess.run(
        [str(programs / "python"), "-c", QUICK_PAGE], cwd=folder, capture_output=True, text=True, timeout=3600
    )
    good = done.returncode == 0 and (folder / "quick" / "index.html").exists()
    print(f"{'ok  ' if good else 'FAIL'} vkernel reproduce, in a coarse form", flush=True)
    return [] if good else [f"vkernel reproduce: {done.stderr[-800:]}"]


def explore(programs: Path, folder: Path) -> list[str]:
    """Open the page; return what is wrong."""
    command = [str(programs / "vkernel"), "explore", "--no-open", "--port", "0"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = re.search(r"http://\S+", server.stdout.readline())
            page = urllib.request.urlopen(address[0], timeout=60).read().decode() if address else ""
        finally:
            server.terminate()
    good = "<html" in page
    print(f"{'ok  ' if good else 'FAIL'} vkernel explore", flush=True)
    return [] if good else ["vkernel explore: no page"]


def import_time(programs: Path) -> float:
    """Return the ratio of the times of import vkernel and import torch, medians of processes by turns."""
    taken: dict[str, list[float]] = {"torch": [], "vkernel": []}
    for _ in range(REPEATS):
        for name, times in taken.items():
            start = time.perf_counter()
            subprocess.run([str(programs / "python"), "-c", f"import {name}"], check=True)
            times.append(time.perf_counter() - start)
    return statistics.median(taken["vkernel"]) / statistics.median(taken["torch"])


def versions() -> list[str]:
    """Return what is wrong with the versions."""
    own = re.search(r'"(.+)"', (ROOT / "src/vkernel/version.py").read_text().partition("__version__")[2])
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.M)
    listed = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert own is not None
    found = {"CITATION.cff": cited and cited[1], "CHANGELOG.md": listed and listed[1]}
    base = own[1].partition(".dev")[0]
    return [f"{name} has {v}, the package {own[1]}" for name, v in found.items() if v not in (own[1], base)]


def main() -> int:
    from typer.main import get_command

    from vkernel.cli.commands import app

    wrong = versions() + not_listed(names(get_command(app)))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        archives = build(folder / "a", 0o022, "UTC")
        first, second = hashes(archives), hashes(build(folder / "b", 0o077, "Asia/Tokyo"))
        wrong += [f"{file} differs when it is built again" for file in first if first[file] != second.get(file)]
        print(f"built {', '.join(first)}; {'equal' if first == second else 'NOT equal'} when built again", flush=True)
        wheel = next(path for path in archives if path.suffix == ".whl")
        programs, place = install(wheel, folder / "env"), folder / "work"
        place.mkdir()
        (place / "small.toml").write_text(SPEC)
        subprocess.run([str(programs / "python"), "-c", NETWORK], check=True, cwd=place)
        print("with the core dependencies:")
        wrong += commands(programs, place, COMMANDS)
        ratio = import_time(programs)
        print(f"import vkernel: {ratio:.2f} times import torch", flush=True)
        wrong += [f"import vkernel takes {ratio:.2f} times as long as import torch"] if ratio > SLOWEST else []
        install(wheel, folder / "env", EXTRAS)
        print(f"with {', '.join(EXTRAS)}:")
        wrong += commands(programs, place, WITH_EXTRAS) + shipped(programs, place)
        wrong += reproduce(programs, place) + explore(programs, place)
        if not wrong:
            shutil.rmtree(ROOT / "dist", ignore_errors=True)
            shutil.copytree(folder / "a" / "dist", ROOT / "dist")
    for sentence in wrong:
        print(f"wrong: {sentence}")
    print("release check: " + ("failed" if wrong else "passed; the archives are in dist/"))
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
