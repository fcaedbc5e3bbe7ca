// Draw every figure in the colours of the style sheet, and again when these change: dark mode, or print.
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const root = document.documentElement;

  const hex = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();
  const channels = (name) => [1, 3, 5].map((at) => parseInt(hex(name).slice(at, at + 2), 16));

  // "@name" is a variable of the style sheet, "@name/60" is 60% of it over the surface, "@name~60" is 60% opaque.
  const resolve = (token) => {
    if (typeof token !== "string" || !token.startsWith("@")) return token;
    const [, name, kind, percent] = token.match(/^@([^/~]+)([/~]?)(.*)$/);
    if (kind === "") return hex(name);
    const share = Number(percent) / 100;
    if (kind === "~") return hex(name) + Math.round(255 * share).toString(16).padStart(2, "0");
    const surface = channels("surface");
    return "rgb(" + channels(name).map((c, i) => Math.round(c * share + surface[i] * (1 - share))).join(",") + ")";
  };

  // Only values of colour keys are tokens; user text may start with "@".
  const paint = (value, key) => {
    if (/color$/.test(key)) return Array.isArray(value) ? value.map(resolve) : resolve(value);
    if (Array.isArray(value)) return value.map((each) => paint(each, ""));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([name, each]) => [name, paint(each, name)]));
  };

  const draw = () => {
    // Layout for print happens only after "beforeprint", so the width is set, not measured: A4 minus margins.
    const size = root.classList.contains("printing") ? { width: 600 } : { autosize: true };
    for (const [id, figure] of Object.entries(figures)) {
      const { data, layout } = paint(figure, "");
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
