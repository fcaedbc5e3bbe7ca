// Before the first paint: light or dark mode as chosen here, else the system's.
(() => {
  try {
    const chosen = localStorage.getItem("theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch {
    // storage may be blocked: use the system's choice
  }
})();
