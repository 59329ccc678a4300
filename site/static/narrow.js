// For a narrow page: a name in code may break after a dot, a slash or an underscore, a row of a table
// becomes a card, in which each cell has its column's name, and a lesson's picture keeps its size in a
// box that scrolls.
const JOINTS = /(?<=[./_])(?=\w)/;
document.addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll("article code.literal .pre").forEach(name => {
    const parts = name.textContent.split(JOINTS).flatMap(part => [document.createElement("wbr"), part]);
    name.replaceChildren(...parts.slice(1));
  });
  document.querySelectorAll("article table.docutils").forEach(table => {
    const heads = [...(table.tHead?.rows[0].cells ?? [])].map(head => head.textContent.trim());
    if (heads.length < 3) {
      return;
    }
    table.classList.add("cards");
    for (const row of table.tBodies[0].rows) {
      [...row.cells].forEach((cell, place) => {
        cell.dataset.head = heads[place].split(JOINTS).join("\u200b");
      });
    }
  });
  document.querySelectorAll("article img.sphx-glr-single-img").forEach(image => {
    const box = document.createElement("div");
    box.className = "picture";
    image.replaceWith(box);
    box.append(image);
  });
});
