// Before anything is painted: light or dark as it was chosen here, else as the system has it.
(() => {
  try {
    const chosen = localStorage.getItem("theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch {
    // storage may be forbidden; the system's choice stands
  }
})();
