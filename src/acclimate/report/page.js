"use strict";
const all = (selector) => [...document.querySelectorAll(selector)];
const root = document.documentElement;

const theme = document.getElementById("theme");
const isDark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
const label = () => { theme.textContent = isDark() ? "Light" : "Dark"; };
theme.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; label(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", label);
theme.hidden = false;
label();

// A method is brought out in every drawing while its name in the legend is pressed or pointed at.
const picks = all("[data-pick]");
const bringOut = (pointed) => {
  const chosen = picks.filter((button) => button === pointed || button.ariaPressed === "true").map((button) => button.dataset.pick);
  document.body.classList.toggle("picked", chosen.length > 0);
  all("[data-m]").forEach((part) => {
    const turn = chosen.indexOf(part.dataset.m);
    part.classList.toggle("on", turn >= 0);
    if (part.matches(".rest")) part.style.setProperty("--hue", turn < 0 ? "" : `var(--hue${6 - turn % 7})`);
  });
};
picks.forEach((button) => {
  button.addEventListener("click", () => { button.ariaPressed = String(button.ariaPressed !== "true"); bringOut(); });
  button.addEventListener("pointerenter", () => bringOut(button));
  button.addEventListener("pointerleave", () => bringOut());
});

const copy = document.getElementById("copy");
copy.addEventListener("click", async () => {
  const card = document.getElementById("card");
  let told = "Copied.";
  try {
    await navigator.clipboard.writeText(card.textContent);
  } catch {  // not every browser gives a file the clipboard: select it instead
    card.closest("details").open = true;
    getSelection().selectAllChildren(card);
    told = "Selected: copy it with your keyboard.";
  }
  document.getElementById("copied").textContent = told;
});
copy.hidden = false;
