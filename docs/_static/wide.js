// Formulas that are wider than their place: inline ones scroll (vkernel.css), displayed ones shrink, down to SMALLEST.
const SMALLEST = 0.75;
window.addEventListener("load", () => {
  if (!window.MathJax || !MathJax.startup) return;
  const mark = () => {
    for (const formula of document.querySelectorAll("article span.math")) {
      formula.classList.remove("wide");
      const right = formula.getBoundingClientRect().right;
      formula.classList.toggle("wide", right > document.documentElement.clientWidth - 8);
    }
    for (const place of document.querySelectorAll("article div.math")) {
      place.style.fontSize = "";
      const width = Math.max(0, ...[...place.querySelectorAll("svg")].map((svg) => svg.getBoundingClientRect().width));
      if (width <= place.clientWidth) continue;
      const size = parseFloat(getComputedStyle(place).fontSize);
      place.style.fontSize = `${size * Math.max(SMALLEST, (0.99 * place.clientWidth) / width)}px`;
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
