// Before the first paint, so that nothing flashes: the theme that was chosen, or the system's.
(() => {
  try {
    const chosen = localStorage.getItem("headrace-theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch {
    // storage is off: the system's theme
  }
})();
