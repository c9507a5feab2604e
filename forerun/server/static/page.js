// The page: conversations with the server that serves it.

import { AnswerView, allowAgain, markChosen, take } from "./answer_view.js";
import * as conversations from "./conversation.js";
import { $, button, copy, element, iconButton, plural } from "./dom.js";
import * as figures from "./figures.js";
import * as files from "./files.js";
import * as models from "./models.js";
import * as panes from "./panes.js";
import { Race } from "./race.js";
import { chat, connect, contextLength, say, server } from "./server.js";
import * as settings from "./settings.js";
import * as sidebar from "./sidebar.js";
import * as store from "./store.js";

const SAVE_MS = 2000; // between two times that an answer is saved while it comes
const NEAR_END = 120; // pixels; whoever is this near to the end sees what comes next

const log = $("log");
const question = $("question");

let conversation = conversations.newConversation();
let running = null; // {conversation, turn, answer, controller, startedAt} of the answer that comes
let views = new Map(); // from the answers that are shown to their elements
let races = new Map(); // from turns to races
const removed = new Set(); // ids of conversations that must not be saved again

const isTokens = () => document.body.dataset.view === "tokens";

// -------------------------------------------------------------------------------------------------------- the elements

/** Changes the conversation on the page, and scrolls to its end if the end was in view. */
function following(write) {
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END;
  write();
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

/** Shows the conversation from its beginning. */
function render() {
  views = new Map();
  races = new Map();
  for (const box of log.querySelectorAll("article")) box.remove();
  const turns = conversations.path(conversation);
  for (const turn of turns) addTurn(turn);
  choose(views.get(turns.at(-1)?.answers[0]) ?? null);
  log.scrollTop = log.scrollHeight;
}

/** Adds a turn to the end of what is shown. */
function addTurn(turn) {
  const box = element("article");
  box.dataset.turn = turn.id;
  box.setAttribute("aria-label", "Question and answer");
  box.append(questionBox(turn));
  if (turn.both) {
    const race = new Race(turn);
    races.set(turn, race);
    box.append(race.box);
  }
  const answers = element("div", turn.both ? "answers pair" : "answers");
  for (const answer of turn.answers) {
    const name = server.models.length > 1 ? turn.settings.model : "";
    const title = turn.both ? (answer.plain ? "Plain decoding" : "With drafts") : name;
    const view = new AnswerView(answer, title, { choose: chooseAndShow, again: () => again(turn) });
    views.set(answer, view);
    answers.append(view.box);
    view.draw(isTokens());
  }
  races.get(turn)?.draw(0, 0);
  box.append(answers);
  log.append(box);
}

function questionBox(turn) {
  const box = element("div", "asked");
  const bubble = element("div", "question");
  for (const { name, text } of turn.files) {
    const file = element("details", "file");
    file.append(element("summary", "", name), element("pre", "", text));
    bubble.append(file);
  }
  if (turn.question) bubble.append(element("p", "", turn.question));
  const tools = element("div", "tools");
  tools.append(
    ...versionButtons(turn),
    iconButton("copy", "Copy the message", (event) => copy(conversations.prompt(turn), event.currentTarget)),
    iconButton("edit", "Edit the message", () => edit(turn, box)),
  );
  box.append(bubble, tools);
  return box;
}

/** Returns buttons that lead to other versions of a turn, if there are any. */
function versionButtons(turn) {
  const all = conversations.versions(conversation, turn);
  if (all.length < 2) return [];
  const at = all.indexOf(turn);
  const go = (name, label, to) => {
    const made = iconButton(name, label, () => {
      conversations.show(conversation, all[to]);
      render();
      refresh();
      save(conversation);
      log.querySelector(`[data-turn="${all[to].id}"] [aria-label="${label}"]:enabled`)?.focus();
    });
    made.classList.add("version");
    made.disabled = !all[to];
    return made;
  };
  const count = element("span", "versions", `${at + 1} of ${all.length}`);
  return [go("older", "Earlier version", at - 1), count, go("newer", "Later version", at + 1)];
}

/** Puts an editor in the place of a question. */
function edit(turn, box) {
  const editor = element("form", "editor");
  const text = Object.assign(element("textarea"), { value: turn.question, rows: Math.min(12, turn.question.split("\n").length + 1) });
  text.setAttribute("aria-label", "Edit the message");
  const send = Object.assign(element("button", "main", "Send"), { type: "submit" });
  const row = element("div", "row");
  const cancel = () => {
    editor.replaceWith(box);
    box.querySelector("[aria-label='Edit the message']").focus();
  };
  row.append(element("span", "hint", "What follows stays as another version."), button("Cancel", cancel), send);
  editor.append(text, row);
  editor.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!canAsk() || !(text.value.trim() || turn.files.length)) return;
    ask(turn.parent, { ...turn, question: text.value, settings: settings.read(), both: $("both").checked });
  });
  text.addEventListener("keydown", (event) => {
    if (event.key === "Escape") cancel();
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    editor.requestSubmit();
  });
  box.replaceWith(editor);
  text.focus();
}

/** Updates everything on the page that depends on the states of answers. */
function refresh() {
  const turns = conversations.path(conversation);
  models.show();
  log.setAttribute("aria-busy", String(running !== null));
  document.body.dataset.ready = String(server.model !== null);
  $("stop").disabled = $("stop").hidden = running === null;
  $("send").hidden = running !== null;
  $("send").disabled = !canAsk();
  $("empty").hidden = turns.length > 0;
  $("title").textContent = conversation.title;
  document.title = turns.length ? `${conversation.title} · forerun` : "forerun";
  for (const turn of turns) {
    for (const answer of turn.answers) {
      const view = views.get(answer);
      view.draw(isTokens());
      allowAgain(view, canAsk(), answer.text !== "");
    }
    races.get(turn)?.draw(running?.startedAt ?? 0, performance.now());
  }
  showContext();
}

/** Shows how much of the context is used. */
function showContext() {
  const used = conversations.usedTokens(conversation);
  const length = contextLength();
  const of = length === null ? "" : ` of ${length.toLocaleString("en")}`;
  const text = used === null ? "" : `${used.toLocaleString("en")}${of} tokens of context used`;
  $("context").textContent = text || (of ? `Nothing is used yet${of} tokens.` : "Nothing is used yet.");
  $("used").textContent = used === null || length === null ? "" : `context ${Math.round((100 * used) / length)} %`;
  $("used").title = text;
  $("context-meter").hidden = length === null;
  $("context-meter").value = used === null || length === null ? 0 : used / length;
}

function choose(view, at = null) {
  if (figures.chosenView()) markChosen(figures.chosenView(), false);
  if (view) markChosen(view, true);
  figures.choose(view, at);
}

/** Chooses an answer because the user asked to see its figures. */
function chooseAndShow(view, at = null) {
  panes.showPanel("tab-figures");
  choose(view, at);
}

// ------------------------------------------------------------------------------------------------------------- answers

const canAsk = () => server.model !== null && running === null;

/** Adds a turn below `parent`, shows it, and has it answered. */
async function ask(parent, given) {
  const turn = conversations.addTurn(conversation, parent, given);
  const asked = conversation;
  if (conversations.versions(asked, turn).length > 1 || log.querySelector(".editor")) render();
  else addTurn(turn);
  choose(views.get(turn.answers[0]));
  log.scrollTop = log.scrollHeight;
  save(asked);
  for (const answer of turn.answers) await fetchAnswer(asked, turn, answer); // one at a time
  running = null;
  following(refresh);
  save(asked);
}

/** Sends a request, and shows the answer as it comes until it ends, fails or is stopped. */
async function fetchAnswer(asked, turn, answer) {
  const controller = new AbortController();
  if (running?.controller.signal.aborted) controller.abort();
  running = { conversation: asked, controller, startedAt: performance.now() };
  answer.state = "running";
  refresh();
  const loading = new models.Loading(turn.settings.model, showContext);
  let savedAt = running.startedAt;
  let frame = requestAnimationFrame(function show() {
    frame = requestAnimationFrame(show);
    draw(turn, answer);
  });
  try {
    for await (const chunk of chat(request(asked, turn, answer), controller.signal)) {
      loading.end();
      take(answer, chunk, performance.now() - running.startedAt);
      if (performance.now() - savedAt < SAVE_MS) continue;
      savedAt = performance.now();
      save(asked);
    }
    answer.state = "done";
  } catch (error) {
    answer.state = controller.signal.aborted ? "stopped" : "failed";
    if (answer.state === "stopped") return;
    const isLost = error instanceof TypeError; // which fetch throws
    answer.error = isLost ? "The server does not answer, or the connection broke." : error.message;
    connect(refresh); // the server may be shutting down, or may have been replaced
  } finally {
    loading.end();
    cancelAnimationFrame(frame);
    draw(turn, answer);
  }
}

const drawn = new WeakMap(); // how many steps of an answer were drawn

/** Shows what came since the last frame, because chunks may come faster than the page is laid out. */
function draw(turn, answer) {
  races.get(turn)?.draw(running.startedAt, performance.now());
  const view = views.get(answer);
  if (!view || (drawn.get(answer) === answer.steps.length && conversations.isOpen(answer))) return;
  drawn.set(answer, answer.steps.length);
  following(() => view.draw(isTokens()));
  if (view === figures.chosenView()) figures.showFigures();
}

/** Returns the body of a request: the conversation before the turn, its question, and its settings. */
function request(asked, turn, answer) {
  return {
    messages: conversations.messages(asked, turn),
    stream: true,
    stream_options: { include_usage: true },
    forerun: true,
    // With different salts the second of two answers cannot reuse the keys and values of the first, so that both
    // read the whole prompt.
    ...(turn.both && { cache_salt: `${Date.now()} ${answer.plain}` }),
    ...settings.fields(turn.settings, answer.plain),
  };
}

/** Asks a question again. The answer that was there becomes another version, unless it has no text. */
function again(turn) {
  if (!canAsk()) return;
  const isLast = conversation.leaf === turn.id;
  if (isLast && turn.answers.every((answer) => !answer.text)) {
    conversations.removeTurn(conversation, turn);
    log.querySelector(`[data-turn="${turn.id}"]`).remove();
  }
  question.focus();
  ask(turn.parent, { ...turn, settings: settings.read() });
}

function send(event) {
  event.preventDefault();
  if (!canAsk() || !(question.value.trim() || files.waiting().length)) return;
  const given = { question: question.value, files: files.waiting(), settings: settings.read(), both: $("both").checked };
  question.value = "";
  fitQuestion();
  files.clear();
  question.focus();
  ask(conversation.leaf, given);
}

function stop() {
  running?.controller.abort();
  question.focus();
}

// ------------------------------------------------------------------------------------------------------- conversations

async function save(changed) {
  if (removed.has(changed.id)) return;
  changed.updatedAt = Date.now();
  try {
    await store.save(changed);
  } catch {
    say("This browser has no room for the conversation: delete or export others.");
  }
  sidebar.draw(conversation.id, open);
}

/** Shows a conversation that is kept. */
async function open(id) {
  panes.close();
  const kept = running?.conversation.id === id ? running.conversation : await store.load(id);
  if (!kept) return sidebar.draw(conversation.id, open);
  if (kept !== running?.conversation) conversations.endOpenAnswers(kept);
  showConversation(kept);
  settings.write(conversations.path(kept).at(-1)?.settings ?? {});
  showContext();
  if (models.missing()) say(`${models.missing()} is not served here: ${server.model} answers.`);
}

function showConversation(next) {
  conversation = next;
  render();
  refresh();
  sidebar.draw(next.id, open);
  question.focus();
}

async function rename(id, title) {
  const kept = [conversation, running?.conversation].find((one) => one?.id === id) ?? (await store.load(id));
  if (!kept) return;
  Object.assign(kept, { title, isNamed: true });
  await store.save(kept);
  refresh();
  sidebar.draw(conversation.id, open);
}

async function remove(id) {
  removed.add(id);
  if (running?.conversation.id === id) stop();
  await store.remove(id);
  if (conversation.id === id) showConversation(conversations.newConversation());
  else sidebar.draw(conversation.id, open);
}

// ------------------------------------------------------------------------------------------------------------ the rest

const hasFieldSizing = CSS.supports("field-sizing", "content");

/** Makes the message's field as high as its text, where the browser does not. */
function fitQuestion() {
  if (hasFieldSizing) return;
  question.style.height = "auto";
  question.style.height = `${question.scrollHeight}px`;
}

function showView(view) {
  document.body.dataset.view = view;
  for (const radio of document.querySelectorAll("[name=view]")) radio.checked = radio.value === view;
  try {
    localStorage.setItem("forerun.view", view);
  } catch {
    // Some browsers keep nothing in private windows.
  }
  following(refresh);
}

function keptView() {
  try {
    return localStorage.getItem("forerun.view") === "tokens" ? "tokens" : "read";
  } catch {
    return "read";
  }
}

function onEscape() {
  if (document.querySelector("dialog[open], :popover-open, .editor:focus-within")) return;
  if (!panes.close() && running) stop();
}

$("ask").addEventListener("submit", send);
$("stop").addEventListener("click", stop);
$("clear").addEventListener("click", () => {
  panes.close();
  showConversation(conversations.newConversation());
});
$("views").addEventListener("change", (event) => showView(event.target.value));
question.addEventListener("input", fitQuestion);
question.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("ask").requestSubmit(); // which also tells the user what is wrong with the settings
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") onEscape();
});
$("examples").addEventListener("click", (event) => {
  if (event.target.tagName !== "BUTTON") return;
  question.value = event.target.textContent;
  fitQuestion();
  question.focus();
});
log.addEventListener("scroll", () => {
  $("down").hidden = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END;
});
$("down").addEventListener("click", () => {
  log.scrollTop = log.scrollHeight;
  question.focus();
});
// An invalid setting is shown, because the user must see it to correct it.
$("settings").addEventListener("invalid", () => panes.showPanel("tab-settings"), true);

models.begin(() => {
  settings.keep();
  refresh();
});
sidebar.begin(rename, remove);
store.isLasting().then((isLasting) => {
  if (!isLasting) $("keeping").textContent = "This browser keeps no conversations: export what you need.";
});
sidebar.draw(null, open);
showView(keptView());
connect(refresh);
