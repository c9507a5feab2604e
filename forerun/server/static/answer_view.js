// One answer on the page, in two views: Read (Markdown) and Tokens (every token marked by its origin). Only the view that
// is shown is drawn, and only what came since it was drawn last.

import { isOpen, spoken } from "./conversation.js";
import { copy, element, icon, iconButton, plural, relabel, seconds } from "./dom.js";
import { Markdown } from "./markdown.js";

export const ORIGINS = {
  draft: "by the draft model or a head",
  lookup: "copied from the text so far",
  phrase: "a phrase that was seen before",
  window: "the model's guess in passing",
  reused: "used again after a rejected token",
  correction: "the model's own, after a rejected one",
  bonus: "the model's own, after all were kept",
};
export const RESTS = "drafts rest: they were slower";

/** Returns a piece of text that is marked by its origin; hovering explains the mark. */
export function piece(text, origin) {
  if (!Object.hasOwn(ORIGINS, origin)) return element("span", "piece", text);
  return Object.assign(element("span", `piece ${origin}`, text), { title: `${origin}: ${ORIGINS[origin]}` });
}

/** Returns whether the guard left drafts out in most steps. */
export const rests = (answer) => 2 * answer.rests > answer.steps.length;
export const speed = (answer) => (answer.time ? (answer.tokens / (answer.time / 1000)).toFixed(1) : "–");
export const tau = (answer) => (answer.tokens / answer.steps.length).toFixed(2);

/** Adds a chunk of the stream, which came `time` ms after the request. With the field `forerun` it is an engine's step. */
export function take(answer, chunk, time) {
  const choice = chunk.choices?.[0];
  const content = choice?.delta?.content ?? "";
  const thinking = choice?.delta?.reasoning_content ?? choice?.delta?.reasoning ?? "";
  const step = chunk.forerun ?? (content || thinking ? { pieces: [[thinking + content, null]], rejected: [] } : null);
  answer.finish = choice?.finish_reason ?? answer.finish;
  answer.time = time;
  answer.text += content;
  answer.thinking += thinking;
  if (step) answer.first ??= time;
  if (step) answer.steps.push({ ...step, at: Math.round(time) });
  if (chunk.forerun) count(answer, step);
  answer.tokens = chunk.usage?.completion_tokens ?? answer.tokens; // fewer if the end cut the last step
  answer.promptTokens = chunk.usage?.prompt_tokens ?? answer.promptTokens;
  if (answer.thoughtFor === null && spoken(answer).thinking && spoken(answer).text) answer.thoughtFor = time - answer.first;
}

function count(answer, step) {
  for (const key of ["drafted", "tested", "accepted", "rests"]) answer[key] += step[key];
  for (const [, origin] of step.pieces) answer.origins[origin] = (answer.origins[origin] ?? 0) + 1;
  answer.tokens = answer.accepted + answer.steps.length; // each step adds a token that the model chose itself
}

/** Returns the line of figures below an answer. */
function facts(answer) {
  if (isOpen(answer) || (answer.state === "failed" && !answer.tokens)) return "";
  const ends = { stopped: "stopped", failed: "", done: answer.finish === "length" ? "cut at max tokens" : "" };
  if (!answer.tokens) return ends[answer.state];
  const gain = rests(answer) ? RESTS : answer.drafted ? `tau ${tau(answer)}` : "";
  const parts = [plural(answer.tokens, "token"), seconds(answer.time), `${speed(answer)} tokens/s`, gain];
  return [...parts, ends[answer.state]].filter(Boolean).join(" · ");
}

/** Tells of the pieces of a text, which come one after the other, whether they lie in a fenced block of code. */
class Fences {
  isOpen = false;
  line = "";
  isCounted = false; // whether the line has opened or closed a block

  take(text) {
    let isCode = this.isOpen;
    for (const part of text.split(/(?<=\n)/)) {
      this.line += part;
      if (!this.isCounted && /^ *(```|~~~)/.test(this.line)) {
        this.isOpen = !this.isOpen;
        this.isCounted = true;
      }
      isCode ||= this.isOpen;
      if (!part.endsWith("\n")) continue;
      this.line = "";
      this.isCounted = false;
    }
    return isCode;
  }
}

/** The elements of an answer. `acts` are functions of the page: choose(view, step) and again(). */
export class AnswerView {
  constructor(answer, title, acts) {
    this.answer = answer;
    this.spans = []; // of each step that is drawn in Tokens
    this.box = element("div", "answer");
    this.tokens = element("div", "text");
    this.read = element("div", "read");
    this.facts = element("p", "facts");
    this.problem = element("p", "error");
    this.again = iconButton("again", "Answer again", acts.again);
    this.figures = iconButton("figures", "Figures and steps", () => acts.choose(this));
    this.thinking = this.#thinking();
    this.markdown = new Markdown(element("div", "prose"));
    this.#clear();
    this.read.append(this.thinking.box, this.markdown.into);
    this.tokens.addEventListener("click", (event) => {
      const at = this.spans.findIndex((spans) => spans.includes(event.target));
      if (at >= 0) acts.choose(this, at);
    });
    const tools = element("div", "tools");
    this.copies = iconButton("copy", "Copy the answer", (event) => copy(spoken(answer).text, event.currentTarget));
    tools.append(this.copies, this.again, this.figures, this.facts);
    if (title) this.box.append(element("h2", "lane-name", title));
    this.box.append(this.read, this.tokens, this.problem, tools);
  }

  #clear() {
    this.spans = [];
    this.fences = new Fences();
    this.tokens.replaceChildren();
  }

  #thinking() {
    const box = element("details", "thinking");
    const title = element("summary");
    const said = element("span");
    const into = element("div", "prose");
    title.append(icon("thought"), said);
    box.append(title, into);
    return { box, said, markdown: new Markdown(into) };
  }

  /** Draws what came since the last call, in the view that is shown. */
  draw(isTokens) {
    this.box.dataset.state = this.answer.state;
    this.facts.textContent = facts(this.answer);
    this.problem.textContent = this.answer.error;
    this.copies.hidden = !this.answer.text;
    this.figures.hidden = !this.answer.steps.length;
    if (isTokens) this.#drawTokens();
    else this.#drawText();
  }

  #drawTokens() {
    for (const step of this.answer.steps.slice(this.spans.length)) {
      const spans = step.pieces.map(([text, origin]) => {
        const made = piece(text, origin);
        made.classList.toggle("mono", this.fences.take(text));
        return made;
      });
      this.spans.push(spans);
      this.tokens.append(...spans);
    }
  }

  #drawText() {
    const isWhole = !isOpen(this.answer);
    const { thinking, text } = spoken(this.answer);
    this.thinking.box.hidden = !thinking;
    if (thinking) {
      const time = this.answer.thoughtFor;
      this.thinking.said.textContent = time === null ? (isWhole ? "Thought" : "Thinking …") : `Thought for ${seconds(time, 1)}`;
      this.thinking.markdown.update(thinking, isWhole);
    }
    this.markdown.update(text, isWhole);
  }
}

export function markChosen(view, isChosen) {
  view.box.classList.toggle("chosen", isChosen);
  view.figures.setAttribute("aria-pressed", String(isChosen));
}

export function allowAgain(view, isAllowed, hasText) {
  view.again.disabled = !isAllowed;
  view.again.hidden = view.answer.plain; // a race is run again as a whole, from its first answer
  relabel(view.again, hasText ? "Answer again" : "Send again");
}
