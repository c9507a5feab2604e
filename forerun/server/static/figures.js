// The panel beside the conversation: figures, origins and steps of the answer that is chosen.

import { ORIGINS, RESTS, piece, rests, speed, tau } from "./answer_view.js";
import { $, button, element, milliseconds } from "./dom.js";

const MAX_MARKS = 12; // rejected tokens that a step's column shows; the text below the strip has all of them
const steps = $("steps");

let chosen = null; // the view of the answer whose figures and steps are shown
let walked = null; // the number of the step that the user chose; null shows the last one

export const chosenView = () => chosen;

/** Returns a text in which line breaks and tabs can be seen, and words in place of an empty one. */
const visible = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥") || "(no text)";

/** Shows the figures and steps of an answer, with the step of number `at` or the last one. */
export function choose(view, at = null) {
  if (view !== chosen) {
    chosen = view;
    steps.replaceChildren();
  }
  walked = at;
  showFigures();
  if (walked !== null) showStep();
}

/** Shows the figures of the chosen answer, and the steps that are not in the strip yet. */
export function showFigures() {
  const answer = chosen?.answer;
  const put = (id, is, text) => { $(id).textContent = is ? text() : "–"; };
  put("tau", answer?.steps.length, () => tau(answer));
  put("alpha", answer?.tested, () => (answer.accepted / answer.tested).toFixed(2));
  put("speed", answer?.tokens, () => speed(answer));
  put("first", answer?.first != null, () => milliseconds(answer.first));
  put("tokens", answer, () => String(answer.tokens));
  put("forwards", answer, () => String(answer.steps.length));
  for (const entry of $("legend").children) {
    entry.querySelector("b").textContent = answer?.origins[entry.dataset.origin] ?? "–";
  }
  $("rests").textContent = answer && rests(answer) ? RESTS : "";
  const fresh = answer?.steps.slice(steps.children.length) ?? [];
  steps.append(...fresh.map((step, number) => column(step, steps.children.length + number)));
  if (walked === null) showStep();
}

/** Returns a step's column in the strip: from below, a box per kept piece and a dashed line per rejected token. */
function column(step, number) {
  const made = element("li");
  made.id = `step-${number}`;
  made.setAttribute("role", "option");
  made.setAttribute("aria-label", `Step ${number + 1}: ${summary(step)}`);
  made.setAttribute("aria-selected", "false");
  made.append(...step.pieces.map(([, origin]) => element("i", Object.hasOwn(ORIGINS, origin) ? origin : "")));
  made.append(...step.rejected.slice(0, MAX_MARKS).map(() => element("i", "rejected")));
  return made;
}

const summary = (step) =>
  step.drafted
    ? `${step.drafted} drafted, ${step.tested} tested, ${step.accepted} accepted, ${step.rejected.length} rejected`
    : `nothing drafted${step.rests ? ": drafts rest" : ""}`;

/** Marks the current step in the strip and in the answer, and describes it below. */
function showStep() {
  for (const marked of document.querySelectorAll("#log .here")) marked.classList.remove("here");
  $(steps.getAttribute("aria-activedescendant"))?.setAttribute("aria-selected", "false");
  const number = walked ?? (chosen?.answer.steps.length ?? 0) - 1;
  const step = chosen?.answer.steps[number];
  if (!step) {
    steps.removeAttribute("aria-activedescendant");
    $("step").replaceChildren(element("p", "", "One forward of the model is a step. The arrow keys walk them."));
    return;
  }
  const option = steps.children[number];
  option.setAttribute("aria-selected", "true");
  steps.setAttribute("aria-activedescendant", option.id);
  scrollTo(option);
  if (walked !== null) chosen.spans[number]?.forEach((span) => span.classList.add("here"));
  describe(step, number);
}

function scrollTo(option) {
  const edge = option.offsetLeft - steps.offsetLeft;
  if (edge < steps.scrollLeft) steps.scrollLeft = edge;
  const hidden = edge + option.offsetWidth - steps.scrollLeft - steps.clientWidth;
  if (hidden > 0) steps.scrollLeft += hidden + 4;
}

function describe(step, number) {
  const kept = element("p", "shown", "Kept: ");
  kept.append(...step.pieces.map(([text, origin]) => piece(visible(text), origin)));
  const lines = [element("p", "", `Step ${number + 1} of ${chosen.answer.steps.length}: ${summary(step)}.`), kept];
  if (step.rejected.length) {
    const rejected = element("p", "shown", "Rejected: ");
    rejected.append(...step.rejected.map((text) => element("s", "", visible(text))));
    lines.push(rejected);
  }
  $("step").replaceChildren(...lines);
}

function walk(event) {
  const last = (chosen?.answer.steps.length ?? 0) - 1;
  const now = walked ?? last;
  const moves = { ArrowLeft: now - 1, ArrowUp: now - 1, ArrowRight: now + 1, ArrowDown: now + 1, Home: 0, End: last };
  if (last < 0 || !Object.hasOwn(moves, event.key)) return;
  event.preventDefault();
  walked = Math.max(0, Math.min(last, moves[event.key]));
  showStep();
  chosen.spans[walked]?.[0]?.scrollIntoView({ block: "nearest" });
}

for (const [origin, meaning] of Object.entries(ORIGINS)) {
  const entry = button("", () => {
    const isHidden = document.body.classList.toggle(`no-${origin}`);
    entry.setAttribute("aria-pressed", String(!isHidden));
  });
  entry.dataset.origin = origin;
  entry.setAttribute("aria-pressed", "true");
  entry.append(piece(origin, origin), element("small", "", meaning), element("b", "", "–"));
  $("legend").append(entry);
}

steps.addEventListener("keydown", walk);
steps.addEventListener("click", (event) => {
  const at = [...steps.children].indexOf(event.target.closest("li"));
  if (at >= 0) choose(chosen, at);
});
