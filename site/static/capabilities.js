// Sorts the table of capabilities by one of them: by its column's button or the choice above.
document.addEventListener("DOMContentLoaded", () => {
  const table = document.querySelector("table.capabilities");
  if (!table) {
    return;
  }
  const choice = document.getElementById("capability");
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const ranks = {yes: 0, no: 1, wrong: 2};
  const narrow = matchMedia("(max-width: 46em)");

  const show = () => {
    // A narrow page has room for one column.
    const probe = choice.value || (narrow.matches ? choice.options[1].value : "");
    table.querySelectorAll("[data-probe]").forEach(cell => {
      cell.toggleAttribute("data-chosen", cell.dataset.probe === probe);
      if (cell.tagName === "TH") {
        cell.ariaSort = cell.dataset.probe === choice.value ? "ascending" : "none";
      }
    });
    const rank = row =>
      choice.value ? ranks[row.querySelector(`td[data-probe="${probe}"]`).dataset.outcome] : 0;
    body.append(...[...rows].sort((a, b) => rank(a) - rank(b)));
  };
  table.querySelectorAll("thead button").forEach(button => {
    button.addEventListener("click", () => {
      const probe = button.parentElement.dataset.probe;
      choice.value = choice.value === probe ? "" : probe;
      show();
    });
  });
  choice.addEventListener("change", show);
  narrow.addEventListener("change", show);
  table.classList.add("sortable");
  show();
});
