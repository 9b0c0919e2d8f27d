// Shows the pictures of one step, which a slider chooses, next to the base's pictures, and enlarges a picture that is clicked.
// Without this script the page shows the pictures of all steps, and a click opens the file of a picture.
"use strict";

function showSteps() {
  for (const card of document.querySelectorAll(".drawn")) {
    const slider = card.querySelector("input"), steps = [...card.querySelectorAll(".step")];
    if (!slider) continue;
    slider.oninput = () => {
      steps.forEach((one, i) => { one.hidden = i !== Number(slider.value); });
      slider.ariaValueText = slider.nextElementSibling.textContent = `step ${steps[slider.value].dataset.step}`;
    };
    slider.oninput();
    slider.parentElement.hidden = false;
    card.classList.add("one");
  }
}

let enlarged = null; // the link of the picture in the dialog

function enlarge(link) {
  const dialog = document.querySelector("dialog"), picture = link.querySelector("img"), shown = dialog.querySelector("img");
  enlarged = link;
  shown.src = picture.src;
  shown.alt = picture.alt;
  dialog.querySelector("p").textContent = [picture.alt, picture.title].filter(Boolean).join(" · ");
  dialog.querySelector("a").href = link.href;
  if (!dialog.open) dialog.showModal();
}

document.addEventListener("click", (event) => {
  const link = event.target.closest("a.enlarge"), dialog = document.querySelector("dialog");
  if (link && !event.ctrlKey && !event.metaKey && !event.shiftKey) {
    event.preventDefault();
    enlarge(link);
  } else if (event.target === dialog) {
    dialog.close();
  }
});

document.addEventListener("keydown", (event) => {
  const change = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!change || !document.querySelector("dialog")?.open || !enlarged) return;
  const links = [...enlarged.closest(".pictures").querySelectorAll("a.enlarge")];
  const next = links[links.indexOf(enlarged) + change];
  if (next) enlarge(next);
});

showSteps();
