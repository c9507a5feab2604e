// Text files that are dropped, pasted or picked, and go along with the next message.

import { $, element, iconButton, plural } from "./dom.js";
import { countTokens, server } from "./server.js";

const MAX_BYTES = 1_000_000; // of a file
let files = []; // {name, text, chip}

/** Returns the files that wait, as {name, text}. */
export const waiting = () => files.map(({ name, text }) => ({ name, text }));

export function clear() {
  files = [];
  $("files").replaceChildren();
}

/** Puts files back, such as those of a question that is edited. */
export function put(given) {
  clear();
  for (const { name, text } of given) add(name, text);
}

function add(name, text) {
  const chip = element("li", "file", name);
  const size = element("span", "size", `${text.length.toLocaleString("en")} characters`);
  const file = { name, text, chip };
  const remove = iconButton("close", `Leave out ${name}`, () => {
    files = files.filter((other) => other !== file);
    chip.remove();
    $("question").focus();
  });
  chip.append(size, remove);
  files.push(file);
  $("files").append(chip);
  if (server.model !== null) countTokens(text).then((count) => count !== null && (size.textContent = plural(count, "token")));
}

/** Reads files, and says which of them are no texts. */
export async function take(given) {
  const problems = [];
  for (const file of given) {
    const text = file.size > MAX_BYTES ? null : await textOf(file);
    if (text === null) problems.push(`${file.name} is ${file.size > MAX_BYTES ? "larger than 1 MB" : "not a text in UTF-8"}.`);
    else add(file.name, text);
  }
  $("file-problem").textContent = problems.join(" ");
  $("question").focus();
}

async function textOf(file) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    return text.includes("\0") ? null : text;
  } catch {
    return null;
  }
}

const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
let depth = 0; // of elements that a file was dragged into

document.addEventListener("dragenter", (event) => {
  if (hasFiles(event)) document.body.classList.toggle("dropping", (depth += 1) > 0);
});
document.addEventListener("dragleave", (event) => {
  if (hasFiles(event)) document.body.classList.toggle("dropping", (depth -= 1) > 0);
});
document.addEventListener("dragover", (event) => hasFiles(event) && event.preventDefault());
document.addEventListener("drop", (event) => {
  if (!hasFiles(event)) return;
  event.preventDefault();
  depth = 0;
  document.body.classList.remove("dropping");
  take(event.dataTransfer.files);
});
$("attach").addEventListener("click", () => $("picked").click());
$("picked").addEventListener("change", () => {
  take([...$("picked").files]);
  $("picked").value = "";
});
