"use strict";
// Sorts each body of a table by the column whose heading is pressed. Unknown values stay last.
for (const table of document.querySelectorAll("table.sortable")) {
  const bodies = [...table.tBodies], heads = [...table.tHead.rows[0].cells];
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
      const compare = (one, other) => {
        const a = key(one), b = key(other);
        if (a === "" || b === "") return (a === "") - (b === "");
        return down ? order(b, a) : order(a, b);
      };
      for (const body of bodies)
        if (body.rows.length > 1) body.append(...[...body.rows].sort(compare));
    });
  });
}
