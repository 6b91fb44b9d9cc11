"""The files of the page have the colours of the package and load nothing from elsewhere."""

from __future__ import annotations

import re

from vkernel import reports
from vkernel.explore.state import ASSETS
from vkernel.plots import base


def test_page_has_the_colours_of_the_package() -> None:
    templates = ASSETS.parents[1] / "reports" / "templates"
    assert templates.parent.name == reports.__name__.rpartition(".")[2]
    style, css = (templates / "style.css").read_text(), (ASSETS / "page.css").read_text()
    light, _, dark = css.partition('[data-theme="dark"]')
    themes = style.split("@media (prefers-color-scheme: dark)")
    for theme, text in zip(themes, (light, dark.partition("}")[0]), strict=True):
        for name in ("ink", "soft", "paper", "page", "line", "accent", "mark", "warn"):
            want, have = (re.search(rf"--{name}: (#\w+)", part) for part in (theme, text))
            assert want is not None
            assert have is not None
            assert want[1] == have[1], name
    for night, text in ((False, light), (True, dark)):
        with base.style(dark=night):
            assert f"--law: {base.lines()[0]}" in text
            assert f"--exact: {base.lines()[1]}" in text


def test_files_name_no_address_elsewhere() -> None:
    for file in ASSETS.iterdir():
        if file.suffix != ".npz":
            found = re.findall(r"(?:https?:)?//[\w-]+\.[\w./-]+", file.read_text(encoding="utf8"))
            assert [address for address in found if "w3.org" not in address] == [], file.name
