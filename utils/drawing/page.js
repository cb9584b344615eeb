"use strict";
for (const gallery of document.querySelectorAll(".gallery")) {
  const menus = [...gallery.querySelectorAll("select")], cards = [...gallery.querySelectorAll(".card")];
  const status = gallery.querySelector("[role=status]");
  const update = () => {
    let shown = 0;
    for (const card of cards) {
      const fits = tag => menus.every((menu, i) => menu.value === "" || menu.value === tag[i]);
      const tags = JSON.parse(card.dataset.tags);
      card.hidden = menus.some(menu => menu.value !== "") && !tags.some(fits);
      shown += card.hidden ? 0 : 1;
    }
    if (status) status.textContent = shown + " of " + cards.length + " shown";
  };
  for (const menu of menus) menu.addEventListener("change", update);
}
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  heads.forEach((head, column) => head.firstElementChild.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") !== "descending";
    for (const other of heads) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const value = row => row.cells[column].dataset.value ?? row.cells[column].textContent;
    const empty = row => value(row) === "";
    const numeric = [...body.rows].every(row => row.cells[column].dataset.value !== undefined);
    const compare = (a, b) => numeric ? value(a) - value(b) : value(a).localeCompare(value(b));
    const rows = [...body.rows].sort((a, b) => empty(a) - empty(b) || (down ? compare(b, a) : compare(a, b)));
    body.append(...rows);
  }));
}
