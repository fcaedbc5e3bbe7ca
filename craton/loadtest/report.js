// Draws every figure in the colours of the style sheet, and again when those change: dark mode, or paper.
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const root = document.documentElement;

  // "@name" is a variable of the style sheet, "@name/40" the same, 40 % opaque.
  const color = (token) => {
    if (typeof token !== "string" || !token.startsWith("@")) return token;
    const [name, percent] = token.slice(1).split("/");
    const hex = getComputedStyle(root).getPropertyValue("--" + name).trim();
    return percent === undefined ? hex : hex + Math.round(2.55 * percent).toString(16).padStart(2, "0");
  };

  // Only values under a key that ends in "color" are tokens: any other text is the user's.
  const painted = (value, key = "") => {
    if (key.endsWith("color")) return color(value);
    if (Array.isArray(value)) return value.map((each) => painted(each));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([name, each]) => [name, painted(each, name)]));
  };

  const draw = () => {
    // A page is laid out for paper only after "beforeprint", so its width is set and not measured: A4 less margins.
    const size = root.classList.contains("printing") ? { width: 600 } : { autosize: true };
    for (const [id, figure] of Object.entries(figures)) {
      const { data, layout } = painted(figure);
      Plotly.react(id, data, { ...layout, ...size }, { displayModeBar: false });
    }
  };

  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  addEventListener("beforeprint", () => { root.classList.add("printing"); draw(); });
  addEventListener("afterprint", () => { root.classList.remove("printing"); draw(); });
  const observer = new ResizeObserver((entries) => entries.forEach((entry) => Plotly.Plots.resize(entry.target)));
  for (const id of Object.keys(figures)) observer.observe(document.getElementById(id));
})();
