// Before the first paint, so that nothing flashes: the theme that was chosen, or the system's, as long as none is.
(() => {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const chosen = () => {
    try {
      return localStorage.getItem("headrace-theme");
    } catch {
      return null; // storage is off
    }
  };
  const follow = () => {
    const own = chosen();
    document.documentElement.dataset.theme = own === "light" || own === "dark" ? own : system.matches ? "dark" : "light";
  };
  follow();
  system.addEventListener("change", follow);
})();
