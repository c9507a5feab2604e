// The choice of a model, where the server has several. It is shown beside the message, and is kept with the settings.

import { $, element } from "./dom.js";
import { say, server, stateOf } from "./server.js";

let wanted = null; // the model that was chosen, which the server may not have

/** Returns the model that is asked; before the server is ready, the one that was chosen, or null. */
export const chosen = () => server.model ?? wanted;

/** Returns the name of the chosen model if the server is ready and does not have it, or null. */
export const missing = () => (server.model === null || wanted === null || server.model === wanted ? null : wanted);

/** Chooses a model; without one, the choice stays. */
export function choose(id) {
  wanted = id ?? wanted;
  show();
}

/** Shows the models that the server has now, and the one that is asked: the chosen one, or else the first. */
export function show() {
  const ids = server.models.map((model) => model.id);
  const select = $("model");
  if (JSON.stringify(ids) !== JSON.stringify([...select.options].map((option) => option.value))) {
    select.replaceChildren(...ids.map((id) => Object.assign(element("option", "", id), { value: id })));
  }
  select.hidden = ids.length < 2;
  server.model = ids.includes(wanted) ? wanted : (ids[0] ?? null);
  if (server.model !== null) select.value = server.model;
  select.title = `Model: ${server.model}`; // a long name may be cut
}

/** Calls a function when the user has chosen another model. */
export function begin(onChange) {
  $("model").addEventListener("change", (event) => {
    choose(event.target.value);
    onChange();
  });
}

/** Tells the user that a model which is to answer is loaded before, because that may take long. */
export class Loading {
  #model;
  #onLoaded;
  #isSaid = false;
  #isOver = false;

  /** `onLoaded` is called when it is loaded, which tells how long its context is. */
  constructor(model, onLoaded) {
    this.#model = model;
    this.#onLoaded = onLoaded;
    if (server.models.length > 1) this.#look();
  }

  async #look() {
    const state = await stateOf(this.#model);
    if (state === "loaded" || this.#isOver) return;
    this.#isSaid = true;
    say(`${this.#model} is being loaded …`);
  }

  /** Ends the wait, because the model answers, or because nobody waits for it any more. */
  async end() {
    if (this.#isOver) return;
    this.#isOver = true;
    if (!this.#isSaid) return;
    const state = await stateOf(this.#model);
    say(state === "loaded" ? `${this.#model} is ready.` : `${this.#model} is not loaded yet.`);
    this.#onLoaded();
  }
}
