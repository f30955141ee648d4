window.report = (function () {
  function all(what, where) { return Array.from((where || document).querySelectorAll(what)); }
  function key(row, place) { return row.cells[place].dataset.key; }
  function sort(button) {
    var head = button.parentNode, table = head.closest("table"), body = table.tBodies[0];
    var place = head.cellIndex, up = head.getAttribute("aria-sort") !== "ascending";
    all("thead th", table).forEach(function (th) { th.setAttribute("aria-sort", "none"); });
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    Array.from(body.rows).sort(function (a, b) {
      var x = key(a, place), y = key(b, place), m = Number(x), n = Number(y);
      if (x === "" || y === "") return (x === "") - (y === "");
      var order = !isNaN(m) && !isNaN(n) ? m - n : x.localeCompare(y);
      return up ? order : -order;
    }).forEach(function (row) { body.appendChild(row); });
  }
  function choose(number) {
    all("[role=tab]").forEach(function (tab) {
      var mine = tab.id === "tab-" + number;
      tab.setAttribute("aria-selected", mine);
      tab.tabIndex = mine ? 0 : -1;
    });
    all(".story").forEach(function (story) { story.hidden = story.id !== "story-" + number; });
    all("nav ul").forEach(function (list) { list.hidden = list.dataset.story !== String(number); });
  }
  function chosen() {
    var tab = document.querySelector("[role=tab][aria-selected=true]");
    return tab ? tab.id.slice(4) : "1";
  }
  function follow() {
    var target = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
    if (!target) return;
    var story = target.closest(".story");
    if (story && story.hidden) choose(story.id.slice(6));
    if (target.tagName === "DETAILS") target.open = true;
    target.scrollIntoView();
  }
  function arrow(event) {
    var tabs = all("[role=tab]"), step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    var next = tabs[(tabs.indexOf(event.target) + step + tabs.length) % tabs.length];
    choose(next.id.slice(4));
    next.focus();
  }
  function filter(input) {
    var words = input.value.trim().toLowerCase();
    all("[data-site]", input.closest(".story")).forEach(function (row) {
      row.hidden = row.dataset.site.toLowerCase().indexOf(words) < 0;
    });
  }
  function toggle(box) {
    all("[data-run]", box.closest(".story")).forEach(function (part) {
      if (part.dataset.run === box.dataset.toggle) part.hidden = !box.checked;
    });
  }
  function once(what, event, act) {
    all(what).forEach(function (element) {
      if (element.dataset.ready) return;
      element.dataset.ready = "yes";
      element.addEventListener(event, act);
    });
  }
  function start(number) {
    once("thead button", "click", function (event) { sort(event.target.closest("button")); });
    once("[data-filter]", "input", function (event) { filter(event.target); });
    once("[data-toggle]", "change", function (event) { toggle(event.target); });
    all("[role=tab]").forEach(function (tab) {
      tab.onclick = function () { choose(tab.id.slice(4)); };
      tab.onkeydown = arrow;
    });
    if (document.querySelector("[role=tab]")) choose(number || chosen());
  }
  var opened = [];
  window.addEventListener("beforeprint", function () {
    opened = all("details:not([open])");
    opened.forEach(function (one) { one.open = true; });
  });
  window.addEventListener("afterprint", function () {
    opened.forEach(function (one) { one.open = false; });
  });
  window.addEventListener("hashchange", follow);
  start();
  follow();
  return { start: start, chosen: chosen };
})();
