// The two columns beside the conversation, and the tabs of the right one. On narrow screens the columns lie over the
// conversation, one at a time, and Escape or a tap beside them closes them.

import { $ } from "./dom.js";

const WIDE = matchMedia("(min-width: 64rem)");
const PANES = [["sidebar", "show-sidebar"], ["panel", "show-panel"]];
const TABS = [["tab-figures", "about"], ["tab-settings", "settings"]];

function open(pane, isOpen) {
  for (const [id, button] of PANES) {
    const isShown = id === pane ? isOpen : WIDE.matches && !$(id).hidden;
    $(id).hidden = !isShown;
    $(button).setAttribute("aria-expanded", String(isShown));
  }
  $("shade").hidden = WIDE.matches || PANES.every(([id]) => $(id).hidden);
}

/** Closes the columns if they lie over the conversation. Returns whether one was open. */
export function close() {
  if (WIDE.matches || $("shade").hidden) return false;
  const [[, button]] = PANES.filter(([id]) => !$(id).hidden);
  open(null, false);
  $(button).focus();
  return true;
}

/** Shows a tab of the panel. */
export function showTab(id) {
  for (const [tab, pane] of TABS) {
    $(tab).setAttribute("aria-selected", String(tab === id));
    $(tab).tabIndex = tab === id ? 0 : -1;
    $(pane).hidden = tab !== id;
  }
}

/** Opens the panel with a tab. */
export function showPanel(tab) {
  showTab(tab);
  open("panel", true);
}

for (const [id, button] of PANES) {
  $(button).addEventListener("click", () => {
    open(id, $(id).hidden);
    if (!WIDE.matches && !$(id).hidden) $(id).querySelector("button, [tabindex]").focus();
  });
}
for (const [index, [tab]] of TABS.entries()) {
  $(tab).addEventListener("click", () => showTab(tab));
  $(tab).addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const [other] = TABS[1 - index];
    showTab(other);
    $(other).focus();
  });
}
$("shade").addEventListener("click", close);
WIDE.addEventListener("change", () => arrange());

/** Opens both columns where there is room for them. */
export function arrange() {
  for (const [id] of PANES) $(id).hidden = !WIDE.matches;
  open(null, false);
}
arrange();
