"""Code of ordinary repositories is imported as it is there: packages, scripts, neighbours, two of one name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import vkernel as vk
from vkernel.adapters.factory import build, named

BLOCKS = "from torch import nn\nclass Block(nn.Linear):\n    def __init__(self, n=3): super().__init__(n, n)\n"
NET = """
from __future__ import annotations
from dataclasses import dataclass
{imports}

@dataclass
class Config:
    width: int = 3

class Net(Block):
    def __init__(self, width, deep=False): super().__init__(width)

def make():
    from {lazy} import Block as Same
    return Same(Config().width)
"""


def repository(root: Path, imports: str, lazy: str, init: bool, marker: str = "setup.py") -> Path:
    folder = root / "repo" / "models"
    folder.mkdir(parents=True)
    (root / "repo" / marker).touch()
    if init:
        (folder / "__init__.py").touch()
    (folder / "blocks.py").write_text(BLOCKS)
    (root / "repo" / "shared.py").write_text(BLOCKS)
    (folder / "unet.py").write_text(NET.format(imports=imports, lazy=lazy))
    return folder / "unet.py"


@pytest.mark.parametrize("init", [True, False])
@pytest.mark.parametrize(
    ("imports", "lazy"),
    [
        ("from .blocks import Block", ".blocks"),
        ("from blocks import Block", "blocks"),
        ("from models.blocks import Block", "models.blocks"),
        ("from shared import Block", "shared"),
    ],
)
def test_repository(imports: str, lazy: str, init: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, before = repository(tmp_path, imports, lazy, init), list(sys.path)
    assert build(f"{path}:make").in_features == 3
    assert build(f"{path}:Net(5, deep=True)").in_features == 5
    with pytest.raises(vk.InputError, match=r"needs arguments: width; write them, .*Net\(width=…\)"):
        build(f"{path}:Net")
    monkeypatch.chdir(path.parents[1])
    assert build("models.unet:Net(width=4)").in_features == 4
    assert sys.path == before


def test_two_repositories_of_one_name(tmp_path: Path) -> None:
    paths = [repository(tmp_path / name, "from .blocks import Block", ".blocks", True) for name in "ab"]
    paths[1].with_name("blocks.py").write_text(BLOCKS.replace("n=3", "n=3, extra=0"))
    made = [named(f"{path}:Block") for path in paths]
    assert [Path(sys.modules[m.__module__].__file__ or "").parent for m in made[1:]] == [paths[1].parent]
    assert made[0] is not made[1]


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        ("import sys; sys.exit(3)", "f", "SystemExit: 3"),
        ("from .. import x", "f", "cannot be imported"),
        ("def f(): raise SystemExit", "f", "failed: SystemExit"),
        ("def f(): return 1", "f", "returned a int, not a Module"),
        ("f = 3", "f", "is a int, not a function"),
        ("def f(n): return n", "f(n=open('x'))", "plain values"),
        ("def f(n): return n", "f(**{'n': 1})", "plain values"),
        ("def f(n): return n", "f(m=1)", "unexpected keyword argument"),
        ("def f(n): return n", "g", "has no 'g'"),
        ("def f(n): return n", "2", "is named package.file"),
    ],
)
def test_refusals(text: str, name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "types.py").write_text(text)  # a name of the standard library
    with pytest.raises(vk.InputError, match=words):
        build(f"{tmp_path / 'types.py'}:{name}")
