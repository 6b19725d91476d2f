// Everything is defined; show it.
themeChanged();
const selector = byId("run");
if (selector) selector.addEventListener("change", () => chooseRun(Number(selector.value)));
chooseRun(0);
drawAll();
themeListeners.push(drawAll);
if (DATA.live) setTimeout(refresh, DATA.every * 1000);
