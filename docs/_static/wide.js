// Marks inline formulas that are wider than the page, so that they scroll (vkernel.css) instead of being cut off.
window.addEventListener("load", () => {
  if (!window.MathJax || !MathJax.startup) return;
  const mark = () => {
    for (const formula of document.querySelectorAll("article span.math")) {
      formula.classList.remove("wide");
      const right = formula.getBoundingClientRect().right;
      formula.classList.toggle("wide", right > document.documentElement.clientWidth - 8);
    }
  };
  MathJax.startup.promise.then(mark);
  window.addEventListener("resize", mark);
});

// Figures of tutorials may be wider than a phone: they scroll in a box of their own.
window.addEventListener("DOMContentLoaded", () => {
  for (const figure of document.querySelectorAll("img.sphx-glr-single-img")) {
    const box = document.createElement("div");
    box.className = "scroll";
    figure.replaceWith(box);
    box.append(figure);
  }
});
