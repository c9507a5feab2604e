// Elements of the page, and how numbers are written in it. Texts are inserted as text, never as HTML.

export const $ = (id) => document.getElementById(id);
export const pause = (time) => new Promise((resolve) => setTimeout(resolve, time));
export const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
export const milliseconds = (time) => (time < 10_000 ? `${Math.round(time)} ms` : seconds(time, 1));
export const seconds = (time, digits = 2) => `${(time / 1000).toFixed(digits)} s`;

/** Returns a new element with a class and a text. */
export function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

/** Returns an icon of the page's sheet of symbols, which screen readers leave out. */
export function icon(name) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  use.setAttribute("href", `#icon-${name}`);
  made.setAttribute("class", "icon");
  made.setAttribute("aria-hidden", "true");
  made.append(use);
  return made;
}

/** Returns a button with a text. */
export function button(text, act, className = "") {
  const made = Object.assign(element("button", className, text), { type: "button" });
  made.addEventListener("click", act);
  return made;
}

/** Returns a button that shows an icon; its label is read aloud and shown when the pointer rests on it. */
export function iconButton(name, label, act) {
  const made = button("", act, "quiet");
  made.append(icon(name));
  relabel(made, label);
  return made;
}

export function relabel(made, label) {
  made.setAttribute("aria-label", label);
  made.title = label;
}

/** Copies a text; the button says for two seconds whether that was done. */
export async function copy(text, from) {
  const label = from.getAttribute("aria-label") ?? from.textContent;
  const isDone = (await writeToClipboard(text)) || selectAndCopy(text);
  const said = isDone ? "Copied" : "Your browser does not let this page copy";
  if (from.hasAttribute("aria-label")) relabel(from, said);
  else from.textContent = said;
  from.classList.add("said");
  await pause(2000);
  from.classList.remove("said");
  if (from.hasAttribute("aria-label")) relabel(from, label);
  else from.textContent = label;
}

async function writeToClipboard(text) {
  try {
    await navigator.clipboard.writeText(text); // exists only on 127.0.0.1 and over HTTPS
    return true;
  } catch {
    return false;
  }
}

function selectAndCopy(text) {
  const held = element("textarea", "offscreen");
  held.value = text;
  document.body.append(held);
  held.select();
  const isDone = document.execCommand("copy");
  held.remove();
  return isDone;
}
