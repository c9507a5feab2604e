// The page: a conversation with the server that serves it. What the model writes is inserted as text, never as HTML.

const ORIGINS = {
  draft: "by the draft model or a head",
  lookup: "copied from the text so far",
  phrase: "a phrase that was seen before",
  window: "the model's guess in passing",
  reused: "used again after a rejected token",
  correction: "the model's own, after a rejected one",
  bonus: "the model's own, after all were kept",
};
const MAX_MARKS = 12; // rejected tokens that a step's column shows; the text below the strip has all of them
const MAX_ERROR = 600; // characters
const RESTS = "drafts rest: they were slower";

const $ = (id) => document.getElementById(id);
const [log, steps, question] = [$("log"), $("steps"), $("question")];

let model = null; // its name, once the server is ready
let connecting = false;
let exchanges = []; // the conversation, which is kept nowhere else
let chosen = null; // the answer whose figures and steps are shown
let walked = null; // the number of the step that the user chose; null shows the last one

/** Returns a new element with a class and a text. */
function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

function button(text, act) {
  const made = Object.assign(element("button", "", text), { type: "button" });
  made.addEventListener("click", act);
  return made;
}

/** Returns a piece of text that is marked by its origin; hovering explains the mark. */
function piece(text, origin) {
  if (!Object.hasOwn(ORIGINS, origin)) return element("span", "piece", text);
  return Object.assign(element("span", `piece ${origin}`, text), { title: `${origin}: ${ORIGINS[origin]}` });
}

/** Returns a text in which line breaks and tabs can be seen, and words in place of an empty one. */
const visible = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥") || "(no text)";
const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
const milliseconds = (time) => (time < 10_000 ? `${Math.round(time)} ms` : `${(time / 1000).toFixed(1)} s`);
const pause = (time) => new Promise((resolve) => setTimeout(resolve, time));

// ---------------------------------------------------------------------------------------------------------- the server

function headers() {
  const key = $("key").value.trim();
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

/** Returns what a response with an error says, for the user to read. */
async function complaint(response) {
  const body = await response.text().catch(() => "");
  let text = body.trimStart().startsWith("<") ? "" : body;
  try {
    const { error } = JSON.parse(body);
    text = error.message + (error.param ? ` (${error.param})` : "");
  } catch {
    // The body is not an error of the API, for example that of a proxy: its text is shown.
  }
  text = (text || response.statusText).slice(0, MAX_ERROR);
  return `${response.status}: ${text}${/[.!?]$/.test(text) ? "" : "."}`;
}

/** Waits until the server is ready, tells the user what it waits for, and gets the model's name. */
async function connect() {
  model = null;
  refresh();
  if (connecting) return;
  connecting = true;
  for (;;) {
    try {
      const health = await fetch("health", { cache: "no-store" });
      if (health.ok) {
        const response = await fetch("v1/models", { headers: headers(), cache: "no-store" });
        if (response.ok) {
          model = (await response.json()).data[0].id;
          connecting = false;
          say(`${model} is ready.`);
          return refresh();
        }
        const needsKey = response.status === 401;
        say(needsKey ? "The server wants an API key: see the settings." : await complaint(response));
      } else if (health.status === 503) {
        say(`${await complaint(health)} Waiting …`);
      } else {
        say(await complaint(health));
      }
    } catch {
      say("The server does not answer. Waiting …");
    }
    await pause(1000);
  }
}

/** Shows a status. Screen readers speak whenever it is written, so the same text is not written twice. */
function say(text) {
  if ($("status").textContent !== text) $("status").textContent = text;
}

/** Yields the objects of a stream of server-sent events, up to [DONE]. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new Error("The connection ended before the answer did.");
      const lines = (held + value).split(/\r?\n/);
      held = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue; // comments keep the connection alive
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// ------------------------------------------------------------------------------------------------------------- answers

/** Returns a request: the conversation before `exchange`, its question, and the settings. */
function request(exchange, plain) {
  const before = exchanges.slice(0, exchanges.indexOf(exchange)).filter((each) => each.answers[0].text);
  const messages = before.flatMap((each) => [
    { role: "user", content: each.question },
    { role: "assistant", content: each.answers[0].text },
  ]);
  if (exchange.system) messages.unshift({ role: "system", content: exchange.system });
  return {
    model,
    messages: [...messages, { role: "user", content: exchange.question }],
    stream: true,
    stream_options: { include_usage: true },
    forerun: true,
    ...(plain && { forerun_method: "ar" }),
    // With different salts the second of two answers cannot reuse the keys and values of the first, so that both
    // read the whole prompt.
    ...(exchange.both && { cache_salt: `${Date.now()} ${plain}` }),
    ...exchange.settings,
  };
}

/** Returns a waiting answer with its elements, which the caller adds to the page. */
function newAnswer(exchange, plain) {
  const answer = {
    exchange, plain, state: "waiting", text: "", error: "", steps: [], fresh: [], startedAt: 0, first: null, time: 0,
    drafted: 0, tested: 0, accepted: 0, rests: 0, origins: {}, tokens: 0, finish: null, controller: new AbortController(),
    box: element("div", "answer"), body: element("div", "text"), facts: element("p", "facts"),
    problem: element("p", "error"), tools: element("div", "tools"),
  };
  answer.show = button("Figures and steps", () => choose(answer));
  answer.again = button("Send again", () => sendAgain(exchange));
  answer.tools.append(answer.show, button("Copy", (event) => copy(answer, event.currentTarget)), answer.again);
  answer.body.addEventListener("click", (event) => {
    const at = answer.steps.findIndex((step) => step.spans.includes(event.target));
    if (at >= 0) choose(answer, at);
  });
  if (exchange.both) answer.box.append(element("h2", "", plain ? "Plain decoding" : "With drafts"));
  answer.box.append(answer.body, answer.facts, answer.problem, answer.tools);
  return answer;
}

/** Adds a chunk to an answer; `draw` shows it. A chunk with the field `forerun` is a step of the engine. */
function take(answer, chunk) {
  if (chunk.error) throw new Error(String(chunk.error.message).slice(0, MAX_ERROR));
  const choice = chunk.choices?.[0];
  const content = choice?.delta?.content ?? "";
  const step = chunk.forerun;
  answer.finish = choice?.finish_reason ?? answer.finish;
  answer.time = performance.now() - answer.startedAt;
  answer.text += content;
  if (step || content) answer.first ??= answer.time;
  const spans = (step?.pieces ?? (content ? [[content, null]] : [])).map(([text, origin]) => piece(text, origin));
  answer.fresh.push(...spans);
  if (step) {
    answer.steps.push({ ...step, spans });
    for (const key of ["drafted", "tested", "accepted", "rests"]) answer[key] += step[key];
    for (const [, origin] of step.pieces) answer.origins[origin] = (answer.origins[origin] ?? 0) + 1;
    answer.tokens = answer.accepted + answer.steps.length; // each step adds a token that the model chose itself
  }
  answer.tokens = chunk.usage?.completion_tokens ?? answer.tokens; // fewer if the end cut the last step
}

/** Shows what came since the last call: once per frame, because chunks may come faster than the page is laid out. */
function draw(answer) {
  following(() => {
    answer.body.append(...answer.fresh.splice(0));
    if (answer === chosen) showFigures();
  });
}

/** Sends a request, and shows the answer as it comes until it ends, fails or is stopped. */
async function fetchAnswer(answer) {
  answer.state = "running";
  answer.startedAt = performance.now();
  refresh();
  let frame = 0;
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: headers(),
      body: JSON.stringify(request(answer.exchange, answer.plain)),
      signal: answer.controller.signal,
    });
    if (!response.ok) {
      const after = response.headers.get("Retry-After");
      throw new Error((await complaint(response)) + (after ? ` Try again in ${after} s.` : ""));
    }
    for await (const chunk of events(response)) {
      take(answer, chunk);
      frame ||= requestAnimationFrame(() => {
        frame = 0;
        draw(answer);
      });
    }
    answer.state = "done";
  } catch (error) {
    answer.state = answer.controller.signal.aborted ? "stopped" : "failed";
    if (answer.state === "stopped") return;
    const isLost = error instanceof TypeError; // which fetch throws
    answer.error = isLost ? "The server does not answer, or the connection broke." : error.message;
    connect(); // the server may be shutting down, or may have been replaced
  } finally {
    cancelAnimationFrame(frame);
    draw(answer);
  }
}

/** Returns the line of figures below an answer. */
function facts(answer) {
  if (isOpen(answer) || (answer.state === "failed" && !answer.tokens)) return "";
  const ends = { stopped: "stopped", failed: "", done: answer.finish === "length" ? "cut at max tokens" : "" };
  const parts = [plural(answer.tokens, "token"), seconds(answer), `${speed(answer)} tokens/s`];
  return [...parts, rests(answer) && RESTS, ends[answer.state]].filter(Boolean).join(" · ");
}

const isOpen = (answer) => answer.state === "waiting" || answer.state === "running";
const seconds = (answer) => `${(answer.time / 1000).toFixed(2)} s`;
const speed = (answer) => (answer.time ? (answer.tokens / (answer.time / 1000)).toFixed(1) : "–");
/** Returns whether the guard left drafts out in most steps. */
const rests = (answer) => 2 * answer.rests > answer.steps.length;

/** Returns a sentence on whether both answers of an exchange are equal, and how their times compare. */
function verdict([fast, plain], temperature) {
  if (fast.state !== "done" || plain.state !== "done") return "Not compared: not both answers came to their end.";
  const ratio = `${((fast.tokens / fast.time) * (plain.time / plain.tokens)).toFixed(2)} times the tokens/s`;
  const gain = rests(fast) ? RESTS : fast.drafted ? ratio : "nothing was drafted";
  const times = `With drafts it took ${seconds(fast)}, then plainly ${seconds(plain)}: ${gain}.`;
  if (fast.text === plain.text) return `The texts are equal: ${plural(fast.text.length, "character")}. ${times}`;
  if (temperature > 0) return `The texts differ, as samples do: one distribution, two draws. ${times}`;
  let same = 0;
  while (fast.text[same] === plain.text[same]) same += 1;
  return `The texts differ from character ${same + 1} on. ${times}`;
}

// -------------------------------------------------------------------------------------------------------- conversation

/** Changes the conversation, and scrolls to its end if the end was in view. */
function following(write) {
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 120;
  write();
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

const isRunning = () => exchanges.some((each) => each.answers.some(isOpen));

/** Updates everything on the page that depends on the states of answers. */
function refresh() {
  const running = isRunning();
  log.setAttribute("aria-busy", String(running));
  $("stop").disabled = !running;
  $("send").disabled = running || model === null;
  $("clear").disabled = running || !exchanges.length;
  $("empty").hidden = exchanges.length > 0;
  for (const exchange of exchanges) {
    for (const answer of exchange.answers) {
      answer.box.dataset.state = answer.state;
      answer.box.classList.toggle("chosen", answer === chosen);
      answer.show.setAttribute("aria-pressed", String(answer === chosen));
      answer.facts.textContent = facts(answer);
      answer.problem.textContent = answer.error;
      answer.again.hidden = running || exchange !== exchanges.at(-1);
      answer.again.disabled = model === null;
    }
  }
}

async function ask(text, settings, system, both) {
  const exchange = { question: text, settings, system, both, box: element("article"), answers: [] };
  exchanges.push(exchange);
  exchange.answers = (both ? [false, true] : [false]).map((plain) => newAnswer(exchange, plain));
  const answers = element("div", "answers");
  answers.append(...exchange.answers.map((answer) => answer.box));
  exchange.box.append(element("p", "question", text), answers);
  log.append(exchange.box);
  log.scrollTop = log.scrollHeight;
  choose(exchange.answers[0]);
  for (const answer of exchange.answers) await fetchAnswer(answer).finally(() => following(refresh)); // one at a time
  const says = both ? [element("p", "verdict", verdict(exchange.answers, settings.temperature))] : [];
  following(() => exchange.box.append(...says));
  refresh();
}

/** Removes an exchange from the conversation, and asks its question again with the same settings. */
function sendAgain(exchange) {
  exchanges = exchanges.filter((each) => each !== exchange);
  exchange.box.remove();
  question.focus();
  ask(exchange.question, exchange.settings, exchange.system, exchange.both);
}

function send(event) {
  event?.preventDefault();
  const text = question.value;
  const number = (id) => ($(id).value === "" ? {} : { [id]: Number($(id).value) });
  if (model === null || isRunning() || !text.trim()) return;
  question.value = "";
  question.focus();
  const settings = { ...number("temperature"), ...number("max_tokens"), ...number("top_p"), ...number("seed") };
  ask(text, settings, $("system").value.trim() && $("system").value, $("both").checked);
}

function stop() {
  for (const exchange of exchanges) exchange.answers.forEach((answer) => answer.controller.abort());
  question.focus();
}

function clear() {
  exchanges.forEach((exchange) => exchange.box.remove());
  exchanges = [];
  choose(null);
  question.focus();
}

async function copy(answer, from) {
  try {
    await navigator.clipboard.writeText(answer.text); // exists only on 127.0.0.1 and over HTTPS
    from.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(answer.body);
    from.textContent = "Selected: press Ctrl+C";
  }
  await pause(2000);
  from.textContent = "Copy";
}

// --------------------------------------------------------------------------------------------------- figures and steps

/** Shows the figures and steps of an answer, with the step of number `at` or the last one. */
function choose(answer, at = null) {
  if (answer !== chosen) {
    chosen = answer;
    steps.replaceChildren();
  }
  walked = at;
  showFigures();
  if (walked !== null) showStep();
  refresh();
}

/** Shows the figures of the chosen answer, and the steps that are not in the strip yet. */
function showFigures() {
  const answer = chosen;
  const put = (id, is, text) => { $(id).textContent = is ? text() : "–"; };
  put("tau", answer?.steps.length, () => (answer.tokens / answer.steps.length).toFixed(2));
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
  made.append(...step.spans.map((span) => element("i", span.className.replace("piece", ""))));
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
  const number = walked ?? (chosen?.steps.length ?? 0) - 1;
  const step = chosen?.steps[number];
  if (!step) {
    steps.removeAttribute("aria-activedescendant");
    return $("step").replaceChildren(element("p", "", "One forward of the model is a step."));
  }
  const option = steps.children[number];
  option.setAttribute("aria-selected", "true");
  steps.setAttribute("aria-activedescendant", option.id);
  const edge = option.offsetLeft - steps.offsetLeft;
  if (edge < steps.scrollLeft) steps.scrollLeft = edge;
  const hidden = edge + option.offsetWidth - steps.scrollLeft - steps.clientWidth;
  if (hidden > 0) steps.scrollLeft += hidden + 4;
  if (walked !== null) step.spans.forEach((span) => span.classList.add("here"));

  const kept = element("p", "shown", "Kept: ");
  kept.append(...step.pieces.map(([text, origin]) => piece(visible(text), origin)));
  const lines = [element("p", "", `Step ${number + 1} of ${chosen.steps.length}: ${summary(step)}.`), kept];
  if (step.rejected.length) {
    const rejected = element("p", "shown", "Rejected: ");
    rejected.append(...step.rejected.map((text) => element("s", "", visible(text))));
    lines.push(rejected);
  }
  $("step").replaceChildren(...lines);
}

function walk(event) {
  const last = (chosen?.steps.length ?? 0) - 1;
  const now = walked ?? last;
  const moves = { ArrowLeft: now - 1, ArrowUp: now - 1, ArrowRight: now + 1, ArrowDown: now + 1, Home: 0, End: last };
  if (last < 0 || !Object.hasOwn(moves, event.key)) return;
  event.preventDefault();
  walked = Math.max(0, Math.min(last, moves[event.key]));
  showStep();
  chosen.steps[walked].spans[0]?.scrollIntoView({ block: "nearest" });
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

$("ask").addEventListener("submit", send);
$("stop").addEventListener("click", stop);
$("clear").addEventListener("click", clear);
steps.addEventListener("keydown", walk);
steps.addEventListener("click", (event) => {
  const at = [...steps.children].indexOf(event.target.closest("li"));
  if (at >= 0) choose(chosen, at);
});
question.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("ask").requestSubmit(); // which also tells the user what is wrong with the settings
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && isRunning()) stop();
});
// An invalid setting is shown, because the user must see it to correct it.
const settings = $("settings").parentElement;
$("settings").addEventListener("invalid", () => { settings.open = true; }, true);
settings.addEventListener("toggle", () => settings.open && settings.scrollIntoView({ block: "nearest" }));
connect();
