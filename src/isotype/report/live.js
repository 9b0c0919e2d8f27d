// Replaces the page's content after the run's files have changed. What a reader has opened, selected or scrolled to stays as it is.
"use strict";

let tag = "";

function replaceWith(text) {
  const fresh = new DOMParser().parseFromString(text, "text/html");
  const opened = [...document.querySelectorAll("details")].map((one) => one.open);
  fresh.querySelectorAll("details").forEach((one, i) => { one.open = opened[i] || false; });
  const scrolled = [...document.querySelectorAll(".scroll, pre")].map((one) => one.scrollLeft);
  const chosen = [...document.querySelectorAll(".drawn input")].map((one) => (one.value === one.max ? null : one.value)); // null: the last step
  const grid = document.querySelector("#all-steps"), freshGrid = fresh.querySelector("#all-steps");
  if (grid && freshGrid) freshGrid.checked = grid.checked;
  const dialog = document.querySelector("dialog"), freshDialog = fresh.querySelector("dialog");
  if (!dialog && freshDialog) document.body.append(freshDialog);
  document.querySelector("main").replaceWith(fresh.querySelector("main"));
  document.querySelectorAll(".scroll, pre").forEach((one, i) => { one.scrollLeft = scrolled[i] || 0; });
  document.querySelectorAll(".drawn input").forEach((one, i) => { one.value = chosen[i] ?? one.max; });
  showSteps();
  document.title = fresh.title;
}

async function look() {
  const began = performance.now();
  let answered = false;
  try {
    const answer = await fetch(location.pathname, { headers: tag ? { "If-None-Match": tag } : {} });
    const text = await answer.text();
    answered = answer.ok || answer.status === 304;
    if (answer.ok && getSelection().isCollapsed) {
      replaceWith(text);
      tag = answer.headers.get("ETag");
    }
  } catch { /* isotype watch has ended, or the machine sleeps */ }
  document.body.classList.toggle("lost", !answered);
  setTimeout(look, Math.max(2000, 10 * (performance.now() - began)));
}

document.addEventListener("submit", (event) => {
  if (!confirm("Save and stop the run? isotype train --resume goes on with it.")) event.preventDefault();
});
setTimeout(look, 2000);
