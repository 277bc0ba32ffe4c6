// Filters of tables, and contents that open what they lead to. Without this file's work a page shows everything.
document.querySelectorAll(".filters").forEach(function (bar) {
  const rows = Array.from(document.querySelectorAll("#" + bar.dataset.of + " tbody tr"));
  const box = bar.querySelector("input"), buttons = Array.from(bar.querySelectorAll("button")), count = bar.querySelector("output");
  function show() {
    const words = box.value.toLowerCase().split(" ");
    const chosen = buttons.filter(function (each) { return each.getAttribute("aria-pressed") === "true"; });
    let left = 0;
    rows.forEach(function (row) {
      const text = row.textContent.toLowerCase();
      const has = words.every(function (word) { return text.includes(word); });
      const of = chosen.length === 0 ? true : chosen.some(function (each) { return row.dataset.is === each.dataset.is; });
      row.hidden = has ? !of : true;
      left += row.hidden ? 0 : 1;
    });
    count.textContent = left + " of " + rows.length + " rows";
  }
  box.addEventListener("input", show);
  buttons.forEach(function (each) {
    each.addEventListener("click", function () {
      each.setAttribute("aria-pressed", each.getAttribute("aria-pressed") === "true" ? "false" : "true");
      show();
    });
  });
  bar.hidden = false;
  show();
});
function reveal() {
  const target = location.hash ? document.getElementById(location.hash.slice(1)) : null;
  for (let each = target; each; each = each.parentElement) if (each.tagName === "DETAILS") each.open = true;
  if (target) target.scrollIntoView();
}
window.addEventListener("hashchange", reveal);
reveal();
