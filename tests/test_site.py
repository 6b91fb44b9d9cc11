"""The built documentation in a browser without a network: mathematics, search, phones, light and dark, images.

``make docs`` builds it; without that, or without chromium, these tests are skipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

SITE = Path(__file__).resolve().parent.parent / "docs" / "_build" / "html"
PAGES = sorted(page for page in SITE.rglob("*.html") if "_static" not in page.parts)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PAGES, reason="the documentation is not built: make docs"),
]
PHONE = {"viewport": {"width": 390, "height": 844}}
IMAGES = "[...document.images].map(i => [i.src, i.hasAttribute('alt'), i.offsetParent === null || i.naturalWidth > 0])"


def opened(chromium: Any, path: Path, query: str = "", **how: Any) -> tuple[Any, list[str]]:
    """Open a page from its file; return it and the addresses of the network that it tried to reach."""
    page, tried = chromium.new_page(**how), list[str]()
    page.on("request", lambda request: tried.append(request.url) if request.url.startswith("http") else None)
    page.route("http*://**", lambda route: route.abort())
    page.goto(f"{path.as_uri()}{query}", wait_until="load")
    return page, tried


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(SITE)))
def test_page_fits_a_phone_and_needs_no_network(chromium: Any, path: Path) -> None:
    page, tried = opened(chromium, path, **PHONE)
    page.wait_for_function("!window.MathJax || !MathJax.startup || MathJax.startup.promise.then(() => true)")
    wide = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    images = page.evaluate(IMAGES)
    page.close()
    assert tried == []
    assert wide <= 1
    assert [image for image in images if not (image[1] and image[2])] == []


def test_mathematics_is_rendered(chromium: Any) -> None:
    page, _ = opened(chromium, SITE / "theory.html")
    page.wait_for_function("window.MathJax && MathJax.startup.promise.then(() => true)", timeout=60000)
    formulas, errors = (page.locator(name).count() for name in ("mjx-container svg", "[data-mjx-error]"))
    raw = page.evaluate(r"[...document.querySelectorAll('.math')].filter(e => /\\[(\[]/.test(e.textContent)).length")
    page.close()
    assert formulas > 500
    assert errors == 0
    assert raw == 0


@pytest.mark.parametrize(
    ("word", "place"), [("VP", "term-VP"), ("C", "term-C"), ("J_K", "term-J_K"), ("V-kernel", "term-V-kernel")]
)
def test_search_finds_the_words_of_the_theory(chromium: Any, word: str, place: str) -> None:
    page, _ = opened(chromium, SITE / "search.html", f"?q={word}")
    page.wait_for_selector("#search-results ul.search li a")
    page.wait_for_timeout(500)
    found = page.eval_on_selector_all("#search-results ul.search li a", "all => all.map(a => a.href)")
    page.close()
    assert any(place in address for address in found[:3]), found[:5]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_picture_follows_the_theme(chromium: Any, theme: str) -> None:
    page, _ = opened(chromium, SITE / "index.html", color_scheme=theme)
    shown = page.eval_on_selector_all("img", "all => all.filter(i => i.offsetParent !== null).map(i => i.src)")
    height = page.evaluate("document.querySelector('.ways').getBoundingClientRect().top")
    page.close()
    assert [Path(name).name for name in shown if "question" in name] == [f"question-{theme}.png"]
    assert height < 720  # the ways in are above the fold
