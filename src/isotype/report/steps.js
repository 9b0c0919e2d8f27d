// Shows the pictures of one step, which a slider chooses, beside the base's; without this script the page shows those of all steps.
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

showSteps();
