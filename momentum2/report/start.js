// Everything is defined; show it. The plots come last: their library, which follows, takes the longest to read.
themeChanged();
const selector = byId("run");
if (selector) selector.addEventListener("change", () => chooseRun(Number(selector.value)));
chooseRun(0);
addEventListener("DOMContentLoaded", () => {
  drawAll();
  themeListeners.push(drawAll);
  if (DATA.live) setTimeout(refresh, DATA.every * 1000);
});
