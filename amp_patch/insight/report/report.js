"use strict";
{
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const byId = (id) => document.getElementById(id);

  // sort: by number where cells have one, what has none last
  const key = (row, column) => {
    const cell = row.cells[column];
    return "v" in cell.dataset ? Number(cell.dataset.v) : cell.textContent;
  };
  const compare = (a, b) => {
    if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
    if (typeof a === "string") return a.localeCompare(b, undefined, { numeric: true });
    return Number.isNaN(a) || Number.isNaN(b) ? Number.isNaN(a) - Number.isNaN(b) : a === b ? 0 : a < b ? -1 : 1;
  };
  for (const button of all("thead button")) {
    button.addEventListener("click", () => {
      const heading = button.parentElement, table = heading.closest("table"), body = table.tBodies[0];
      const descending = heading.getAttribute("aria-sort") === "ascending";
      for (const other of all("thead th", table)) other.setAttribute("aria-sort", "none");
      heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
      const rows = [...body.rows].map((row) => [key(row, heading.cellIndex), row]);
      const isLast = (value) => typeof value === "number" ? Number.isNaN(value) : value === "-" || value === "";
      rows.sort(([a], [b]) => isLast(a) || isLast(b) ? isLast(a) - isLast(b) : compare(a, b) * (descending ? -1 : 1));
      body.append(...rows.map(([, row]) => row));
    });
  }

  // a shadow where more of a table is
  for (const box of all(".box")) {
    const update = () => box.classList.toggle("more", box.scrollLeft + box.clientWidth < box.scrollWidth - 1);
    box.addEventListener("scroll", update, { passive: true });
    new ResizeObserver(update).observe(box);
  }

  // filter: rows that have all words
  for (const field of all("input[data-table]")) {
    const rows = [...byId(field.dataset.table).tBodies[0].rows], told = byId(field.id).parentElement.querySelector("output");
    const filter = () => {
      const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const row of rows) {
        const text = [...row.cells].map((cell) => cell.textContent).join(" ").toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
        shown += !row.hidden;
      }
      told.textContent = `${shown} of ${rows.length} rows`;
    };
    field.addEventListener("input", filter);
    filter(); // a browser may have kept what was typed
  }

  // runs that the charts show
  for (const button of all("[data-run]")) {
    button.addEventListener("click", () => {
      const show = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", show);
      for (const group of all("[data-series]")) {
        if (group.dataset.series === button.dataset.run) group.style.display = show ? "" : "none";
      }
    });
  }

  const records = byId("records"); // a check has none, and no histogram
  const lines = records ? records.textContent.trim().split("\n") : [];

  // zones of the histogram, as comparing/exponents.py and report/charts.py have them
  const FORMATS = { f16: [-25, -14, 15, 3], bf16: [-134, -126, 127, 2] };
  const CLASSES = 4;
  const findShares = (record, low, power) => {
    const [zeroAt, normal, last, infiniteFrom] = FORMATS[low];
    const found = [0, 0, 0];
    let total = 0;
    record.counts.forEach((number, place) => {
      const exponent = record.lowest + Math.floor(place / CLASSES) + power, kind = place % CLASSES;
      total += number;
      if (exponent < zeroAt || (exponent === zeroAt && kind === 0)) found[0] += number;
      else if (exponent < normal) found[1] += number;
      else if (exponent > last || (exponent === last && kind >= infiniteFrom)) found[2] += number;
    });
    return found.map((number) => (100 * number) / (total || 1));
  };
  const histogram = byId("histogram");
  if (histogram) {
    const parsed = lines.map((line) => JSON.parse(line));
    const { reference } = parsed.find((record) => record.kind === "comparison");
    const record = parsed.find((one) => one.kind === "gradients" && one.run === reference);
    const [first, last, left, width] = ["first", "last", "left", "width"].map((name) => Number(histogram.dataset[name]));
    const update = () => {
      const power = Number(byId("scale").value), low = byId("low").value, [zeroAt, normal, top] = FORMATS[low];
      const place = (exponent) => left + (Math.min(Math.max(exponent - power, first), last) - first) * width;
      const edges = [[left, place(zeroAt)], [place(zeroAt), place(normal)], [place(top + 1), place(1e4)]];
      ["zero", "subnormal", "infinite"].forEach((zone, index) => {
        const rect = histogram.querySelector(`rect.${zone}`);
        rect.setAttribute("x", edges[index][0]);
        rect.setAttribute("width", edges[index][1] - edges[index][0]);
      });
      const names = ["zero", "subnormal", "infinite"];
      byId("shares").textContent = findShares(record, low, power).map((share, n) => `${share.toFixed(2)} % ${names[n]}`).join(", ");
      byId("scale-text").textContent = `2^${power} = ${(2 ** power).toLocaleString("en-US")}`;
      byId("scale").setAttribute("aria-valuetext", `2 to the ${power}`);
    };
    byId("scale").addEventListener("input", update);
    byId("low").addEventListener("change", update);
    update();
  }

  byId("download")?.addEventListener("click", () => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([`${lines.join("\n")}\n`], { type: "application/x-ndjson" }));
    link.download = "records.jsonl";
    link.click();
    URL.revokeObjectURL(link.href);
  });
}
