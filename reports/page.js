// Sorts tables by a column when its heading is pressed: up, down, and back to the order of the study. Rows stay
// under the heading of their corpus; what has no value stays last. Without this script the tables are as readable.
(() => {
  "use strict";
  const POWERS = "⁰¹²³⁴⁵⁶⁷⁸⁹";
  const VERDICTS = "●◐○·≠×~";
  const NUMBER = /(−?)(?:(\d[\d,]*(?:\.\d+)?)(?:×10(⁻?[⁰¹²³⁴⁵⁶⁷⁸⁹]+))?|(∞))/;
  const NEXT = { none: "ascending", ascending: "descending", descending: "none" };

  function power(words) {
    const digits = [...words.replace("⁻", "")].map((one) => POWERS.indexOf(one)).join("");
    return (words.startsWith("⁻") ? -1 : 1) * Number(digits);
  }

  // The first number of a cell: of "● 0.93 [0.91, 0.95]", "3.2×10⁷", "10⁻⁵", "−4,567", "< 0.001", "12.3 %".
  function number(words) {
    const bare = /^10(⁻?[⁰¹²³⁴⁵⁶⁷⁸⁹]+)$/.exec(words);
    if (bare) return 10 ** power(bare[1]);
    const found = NUMBER.exec(words);
    if (!found) return null;
    const size = found[4] ? Infinity : Number(found[2].replaceAll(",", "")) * 10 ** (found[3] ? power(found[3]) : 0);
    return found[1] ? -size : size;
  }

  function value(row, at, isNumber) {
    const words = row.cells[at].textContent.trim();
    if (words === "" || words === "–") return null;
    return isNumber ? number(words) : words;
  }

  function compare(one, other) {
    if (typeof one === "number") return one < other ? -1 : one > other ? 1 : 0;
    const ranks = [one, other].map((words) => VERDICTS.indexOf(words[0]));
    if (ranks[0] >= 0 && ranks[1] >= 0 && ranks[0] !== ranks[1]) return ranks[0] - ranks[1];
    return one.localeCompare(other, "en", { numeric: true });
  }

  function sort(table, at, isNumber, direction) {
    const body = table.tBodies[0], sign = direction === "descending" ? -1 : 1, ordered = [];
    let run = [];
    const close = () => {
      if (direction === "none") run.sort((one, other) => one.place - other.place);
      else run.sort((one, other) => {
        const pair = [value(one, at, isNumber), value(other, at, isNumber)];
        if (pair[0] === null || pair[1] === null) return (pair[0] === null) - (pair[1] === null) || one.place - other.place;
        return sign * compare(...pair) || one.place - other.place;
      });
      ordered.push(...run);
      run = [];
    };
    for (const row of body.rows) {
      if (row.cells[0].scope === "colgroup") { close(); ordered.push(row); } else run.push(row);
    }
    close();
    body.append(...ordered);
  }

  // The heading of every column, in order, with the one above it where there are two.
  function leaves(head) {
    const found = [], below = head.rows[1] ? [...head.rows[1].cells] : [];
    for (const cell of head.rows[0].cells) {
      if (!cell.classList.contains("over")) found.push([cell, ""]);
      else for (let n = 0; n < cell.colSpan; n += 1) found.push([below.shift(), cell.textContent.trim()]);
    }
    return found;
  }

  for (const table of document.querySelectorAll(".sortable table")) {
    [...table.tBodies[0].rows].forEach((row, place) => { row.place = place; });
    const columns = leaves(table.tHead);
    columns.forEach(([cell, above], at) => {
      const button = document.createElement("button"), isNumber = !cell.classList.contains("l");
      button.type = "button";
      button.append(...cell.childNodes);
      if (button.textContent.trim() === "") button.setAttribute("aria-label", above || "value");
      cell.append(button);
      cell.setAttribute("aria-sort", "none");
      button.addEventListener("click", () => {
        const direction = NEXT[cell.getAttribute("aria-sort")];
        for (const [other] of columns) other.setAttribute("aria-sort", "none");
        cell.setAttribute("aria-sort", direction);
        sort(table, at, isNumber, direction);
      });
    });
  }
})();
