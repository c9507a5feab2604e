// The settings panel. What is set is kept in this browser, except the key.

import { $ } from "./dom.js";
import * as models from "./models.js";

const KEPT = "forerun.settings";
const NUMBERS = ["temperature", "max_tokens", "top_p", "top_k", "min_p", "repetition_penalty", "seed"];

/** Returns the settings: numbers and the chosen model under the API's names where they are set, `system`, and `method`. */
export function read() {
  const given = NUMBERS.filter((id) => $(id).value !== "").map((id) => [id, Number($(id).value)]);
  const system = $("system").value.trim() && $("system").value;
  const more = { system, method: $("method").value, model: models.chosen() };
  return { ...Object.fromEntries(given), ...Object.fromEntries(Object.entries(more).filter(([, value]) => value)) };
}

/** Returns the fields of a request that stand for settings. */
export function fields({ system, method, ...named }, isPlain) {
  return { ...named, ...((isPlain || method === "ar") && { forerun_method: "ar" }) };
}

/** Shows settings, such as those that a conversation was held with; without any, the defaults. */
export function write(settings) {
  const { model, ...others } = settings;
  const isDefault = !Object.keys(others).length;
  models.choose(model);
  for (const id of NUMBERS) $(id).value = settings[id] ?? (isDefault ? $(id).defaultValue : "");
  $("system").value = settings.system ?? "";
  $("method").value = settings.method ?? "";
}

export function keep() {
  try {
    localStorage.setItem(KEPT, JSON.stringify(read()));
  } catch {
    // Some browsers keep nothing in private windows.
  }
}

try {
  write(JSON.parse(localStorage.getItem(KEPT)) ?? {});
} catch {
  write({});
}
$("settings").addEventListener("input", keep);
$("reset").addEventListener("click", () => {
  write({});
  keep();
});
