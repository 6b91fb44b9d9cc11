"""Check a release: ``make release-check``.

1. sdist and wheel are built twice, with the time of the last commit, and are equal byte by byte;
2. the wheel alone, with the packages that it asks for, is installed into an empty environment;
3. every command runs there, or says which extra it needs;
4. ``import vkernel`` takes at most 1.3 times as long as ``import torch``;
5. the versions in the package, CHANGELOG.md and CITATION.cff are the same."""

from __future__ import annotations

import hashlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

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
COMMANDS = {  # arguments, and what the answer holds; an exit code of 2 is a refusal
    "--version": (0, "0."),
    "--help": (0, "profile"),
    "profile toy:triple --html profile.html --json profile.json": (0, "noise"),
    "monitor run --html monitor.html": (0, "learning"),
    "audit weights.safetensors --module network.py:make --predicts x0 --time t --betas vp --data train.npy"
    " --test test.npy --quick --samples 16 --html audit.html": (0, ""),
    "study list": (2, "pip install 'vkernel[study]'"),
    "reproduce --out out": (2, "pip install 'vkernel[study]'"),
    "explore --no-open": (2, "pip install 'vkernel[explore]'"),
}


def build(into: Path) -> dict[str, str]:
    """Build sdist and wheel; return their hashes by name."""
    stamp = subprocess.check_output(["git", "log", "-1", "--format=%ct"], cwd=ROOT, text=True).strip()
    environment = os.environ | {"SOURCE_DATE_EPOCH": stamp}
    # from the files that are committed or staged, not from what lies beside them
    tree = into / "tree"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(tree)], check=True)
    command = [sys.executable, "-m", "build", "-q", "--outdir", str(into / "dist"), str(tree)]
    subprocess.run(command, check=True, env=environment)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted((into / "dist").iterdir())}


def install(wheel: Path, into: Path) -> Path:
    """Make an empty environment with the wheel and what it asks for; return its programs."""
    venv.create(into, with_pip=True)
    pip = [str(into / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
    limits = ["-c", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, *limits, "torch"], check=True)
    subprocess.run([*pip, *limits, str(wheel)], check=True)
    subprocess.run([str(into / "bin" / "pip"), "check"], check=True)
    return into / "bin"


def commands(programs: Path, folder: Path) -> list[str]:
    """Run every command; return what is wrong."""
    wrong = []
    subprocess.run([str(programs / "python"), "-c", NETWORK], check=True, cwd=folder)
    for line, (code, text) in COMMANDS.items():
        done = subprocess.run(
            [str(programs / "vkernel"), *line.split()], cwd=folder, capture_output=True, text=True, timeout=600
        )
        said = done.stdout + done.stderr
        good = done.returncode == code and text in " ".join(said.split()) and "Traceback" not in said
        print(f"{'ok  ' if good else 'FAIL'} vkernel {line}", flush=True)
        if not good:
            wrong.append(f"vkernel {line}: exit code {done.returncode}, not {code}, or no {text!r} in: {said[-800:]}")
    return wrong


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
    wrong = versions()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first, second = (build(folder / part) for part in ("a", "b"))
        wrong += [f"{file} differs when it is built again" for file in first if first[file] != second.get(file)]
        print(f"built {', '.join(first)}; {'equal' if first == second else 'NOT equal'} when built again", flush=True)
        wheel = next((folder / "a" / "dist").glob("*.whl"))
        programs, place = install(wheel, folder / "env"), folder / "work"
        place.mkdir()
        wrong += commands(programs, place)
        ratio = import_time(programs)
        print(f"import vkernel: {ratio:.2f} times import torch", flush=True)
        wrong += [f"import vkernel takes {ratio:.2f} times as long as import torch"] if ratio > SLOWEST else []
    for sentence in wrong:
        print(f"wrong: {sentence}")
    print("release check: " + ("failed" if wrong else "passed"))
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
