// - Pictures are enlarged by a click or by Enter; a picture of the player opens the player below it.
// - Blocks of code know their columns. Lines of commands are blocks of their own, and their options are not broken.
// - Cells of stacked tables know the names of their columns, and an empty first cell knows the name above it.
// - In a narrow table of times, the first column has all keys of a row.
// - Long names may be broken after an underscore, a bracket, a comma or a dot.
// - Predictions get a box to write in. The text in the box stays in the page.
function enlarge(picture) {
  const dialog = document.createElement("dialog");
  dialog.className = "enlarged";
  const copy = document.createElement("img");
  copy.src = picture.currentSrc || picture.src;
  copy.alt = picture.alt;
  dialog.append(copy);
  dialog.addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => { dialog.remove(); picture.focus(); });
  document.body.append(dialog);
  dialog.showModal();
}

function predictionBox() {
  const box = document.createElement("textarea");
  box.className = "prediction";
  box.rows = 2;
  box.placeholder = "Your prediction";
  box.setAttribute("aria-label", "Your prediction");
  return box;
}

document.addEventListener("DOMContentLoaded", () => {
  for (const picture of document.querySelectorAll("article img")) {
    if (picture.closest("a")) continue;  // it leads somewhere
    picture.tabIndex = 0;
    const player = picture.src.includes("/player") && picture.parentElement.nextElementSibling;
    const act = player?.matches?.("details.player") ? () => { player.open = true; player.scrollIntoView(); } : () => enlarge(picture);
    picture.addEventListener("click", act);
    picture.addEventListener("keydown", (event) => { if (event.key === "Enter") act(); });
  }
  for (const block of document.querySelectorAll("article div.highlight pre")) {
    block.style.setProperty("--columns", Math.max(...block.textContent.split("\n").map((line) => line.length)));
  }
  const option = /(^|[\s>])(--[\w-]+)/g;
  for (const block of document.querySelectorAll("article div:is(.highlight-sh, .highlight-bash) pre")) {
    const lines = block.innerHTML.replace(/\n$/, "").split("\n");
    const isWhole = (line) => line.split("<span").length === line.split("</span>").length;
    if (lines.every(isWhole)) block.innerHTML = lines.map((line) => `<span class="line">${line.replace(option, "$1<span class='option'>$2</span>")}\n</span>`).join("");
  }
  for (const table of document.querySelectorAll(".stacked table")) {
    const names = [...table.querySelectorAll("th")].map((name) => name.textContent.replace(/[^?]$/, "$&:"));
    let last = "";
    for (const { cells } of table.tBodies[0].rows) {
      [...cells].forEach((cell, i) => { if (names[i] && cell.textContent) cell.dataset.column = names[i]; });
      if (cells[0].textContent) last = cells[0].textContent;
      else cells[0].dataset.again = last;
    }
  }
  for (const table of document.querySelectorAll(":not(.stacked) > .table-wrapper table")) {
    const heads = [...table.querySelectorAll("th")];
    const keys = heads.map((head, i) => i).filter((i) => i && ["ranks", "transport", "kind"].includes(heads[i].textContent));
    if (heads[0].textContent !== "params" || !keys.length) continue;
    for (const i of keys) heads[i].dataset.key = "";
    for (const { cells } of table.tBodies[0].rows) {
      for (const i of keys) cells[i].dataset.key = "";
      cells[0].dataset.keys = keys.map((i) => cells[i].textContent + (heads[i].textContent === "ranks" ? " ranks" : "")).join(", ");
    }
  }
  for (const word of document.querySelectorAll("article code .pre")) {
    if (word.textContent.length > 28) word.innerHTML = word.innerHTML.replace(/[_(,.]/g, "$&<wbr>");
  }
  for (const answer of document.querySelectorAll("details.predict")) answer.before(predictionBox());
  for (const question of document.querySelectorAll(":is(#predict, [id^=before-you-code]) > ol > li")) question.append(predictionBox());
});
