// The list of conversations, and what its menu does with one of them.

import { toJson, toMarkdown } from "./conversation.js";
import { $, button, element, iconButton } from "./dom.js";
import * as store from "./store.js";

let drawn = ""; // what the list shows
let target = null; // the head of the conversation whose menu is open

/** Shows the conversations with the one of id `shown` marked; `open` is called with the id of one that is chosen. */
export async function draw(shown, open) {
  const heads = await store.list();
  const now = JSON.stringify([shown, heads.map(({ id, title }) => [id, title])]);
  if (now === drawn) return; // so that the keyboard's focus stays where it is
  drawn = now;
  $("none").hidden = heads.length > 0;
  $("conversations").replaceChildren(...heads.map((head) => entry(head, head.id === shown, open)));
}

function entry(head, isShown, open) {
  const made = element("li");
  const link = button(head.title, () => open(head.id), "conversation");
  link.title = head.title;
  if (isShown) link.setAttribute("aria-current", "true");
  const more = iconButton("more", `More for ${head.title}`, () => showMenu(head, more));
  more.setAttribute("aria-haspopup", "true");
  made.append(link, more);
  return made;
}

function showMenu(head, from) {
  target = head;
  const menu = $("menu");
  menu.showPopover();
  const at = from.getBoundingClientRect();
  menu.style.left = `${Math.min(at.left, innerWidth - menu.offsetWidth - 8)}px`;
  menu.style.top = `${Math.min(at.bottom + 4, innerHeight - menu.offsetHeight - 8)}px`;
  menu.querySelector("button").focus();
}

/** Offers a text as a file. */
function download(name, type, text) {
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}

const fileName = (title) => title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "chat";

function ask(dialog) {
  return new Promise((resolve) => {
    dialog.returnValue = "";
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
    dialog.showModal();
  });
}

/** Makes the menu work. `onRename(id, title)` and `onRemove(id)` are called once the user has said so. */
export function begin(onRename, onRemove) {
  const acts = {
    rename: async ({ id, title }) => {
      $("name").value = title;
      if ((await ask($("rename"))) && $("name").value.trim()) onRename(id, $("name").value.trim());
    },
    remove: async ({ id, title }) => {
      $("removed").textContent = title;
      if (await ask($("remove"))) onRemove(id);
    },
    markdown: async ({ id, title }) => download(`${fileName(title)}.md`, "text/markdown", toMarkdown(await store.load(id))),
    json: async ({ id, title }) => download(`${fileName(title)}.json`, "application/json", toJson(await store.load(id))),
  };
  $("menu").addEventListener("click", (event) => {
    const act = acts[event.target.dataset.act];
    if (!act) return;
    $("menu").hidePopover();
    act(target);
  });
  for (const dialog of [$("rename"), $("remove")]) {
    dialog.querySelector("[data-act=close]").addEventListener("click", () => dialog.close());
  }
}
