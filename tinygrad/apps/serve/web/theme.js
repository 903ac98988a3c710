// Before the first paint: the theme that was chosen, where one was. It stands by itself because a module runs after the paint.
const chosen = localStorage.getItem("theme");
if (chosen) document.documentElement.dataset.theme = chosen;
