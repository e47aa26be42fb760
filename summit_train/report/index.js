"use strict";
// Sorts a table by the column whose heading is pressed. Unknown values stay last.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const numbers = head.classList.contains("n"), was = head.getAttribute("aria-sort");
      const down = was ? was === "ascending" : numbers;
      heads.forEach((one) => one.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = (row) => row.cells[column].dataset.v ?? row.cells[column].textContent.trim();
      const order = (a, b) => numbers ? a - b : a.localeCompare(b, undefined, {numeric: true});
      body.append(...[...body.rows].sort((one, other) => {
        const a = key(one), b = key(other);
        if (a === "" || b === "") return (a === "") - (b === "");
        return down ? order(b, a) : order(a, b);
      }));
    });
  });
}
