// What a conversation is. Its turns are a tree, because a question that is edited or asked again keeps what was there
// before: turns with the same parent are versions of each other, and `leaf` says which path is shown.
//
// A turn: {id, parent, question, files: [{name, text}], settings, both, answers}. Its answers are one, or with `both` two:
// with drafts, then plain. All of it is data without elements, so that it can be stored and exported.

const TITLE_LENGTH = 48; // characters

const newId = () => Date.now().toString(36) + Math.random().toString(36).slice(2, 10);

export function newConversation() {
  const now = Date.now();
  return { id: newId(), title: "New chat", isNamed: false, createdAt: now, updatedAt: now, turns: [], leaf: null };
}

export const newAnswer = (plain) => ({
  plain, state: "waiting", text: "", thinking: "", error: "", steps: [], first: null, time: 0, thoughtFor: null,
  drafted: 0, tested: 0, accepted: 0, rests: 0, origins: {}, tokens: 0, promptTokens: null, finish: null,
});

/** Adds a turn below the turn `parent`, and shows it. */
export function addTurn(conversation, parent, { question, files, settings, both }) {
  const answers = (both ? [false, true] : [false]).map(newAnswer);
  const turn = { id: newId(), parent, question, files, settings, both, answers };
  conversation.turns.push(turn);
  conversation.leaf = turn.id;
  if (!conversation.isNamed && parent === null) conversation.title = titleOf(turn);
  return turn;
}

function titleOf({ question, files }) {
  const line = question.trim().split("\n")[0] || files[0]?.name || "New chat";
  return line.length > TITLE_LENGTH ? `${line.slice(0, TITLE_LENGTH - 1).trimEnd()}…` : line;
}

const find = (conversation, id) => conversation.turns.find((turn) => turn.id === id);

/** Returns the turns that are shown, the first one first. */
export function path(conversation) {
  const turns = [];
  for (let turn = find(conversation, conversation.leaf); turn; turn = find(conversation, turn.parent)) turns.unshift(turn);
  return turns;
}

/** Returns a turn and its other versions, the oldest first. */
export const versions = (conversation, turn) => conversation.turns.filter((other) => other.parent === turn.parent);

/** Shows the newest path through a turn. */
export function show(conversation, turn) {
  let leaf = turn;
  for (let next = turn; next; next = conversation.turns.findLast((other) => other.parent === leaf.id)) leaf = next;
  conversation.leaf = leaf.id;
}

/** Removes a turn that nothing hangs on, for example one without an answer. */
export function removeTurn(conversation, turn) {
  conversation.turns = conversation.turns.filter((other) => other !== turn);
  if (conversation.leaf === turn.id) conversation.leaf = turn.parent;
}

/** Ends answers that were still open when the page was closed. */
export function endOpenAnswers(conversation) {
  for (const answer of conversation.turns.flatMap((turn) => turn.answers)) {
    if (isOpen(answer)) answer.state = "stopped";
  }
}

export const isOpen = (answer) => answer.state === "waiting" || answer.state === "running";

/** Returns what a turn asks: its files, each in a block of code, and the question. */
export function prompt({ question, files }) {
  const blocks = files.map(({ name, text }) => {
    const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((ticks) => ticks.length));
    const fence = "`".repeat(longest + 1);
    return `${name}:\n${fence}${extension(name)}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
  });
  return [...blocks, question].filter(Boolean).join("\n\n");
}

const extension = (name) => name.match(/\.(\w+)$/)?.[1].toLowerCase() ?? "";

/** Returns the thinking and the text of an answer, which may come apart or between the marks of thinking. */
export function spoken(answer) {
  if (answer.thinking) return { thinking: answer.thinking, text: answer.text };
  const end = answer.text.indexOf("</think>");
  const isMarked = /^\s*<think>/.test(answer.text);
  if (end < 0 && !isMarked) return { thinking: "", text: answer.text };
  const thinking = (end < 0 ? answer.text : answer.text.slice(0, end)).replace(/^\s*<think>\n?/, "");
  return { thinking, text: end < 0 ? "" : answer.text.slice(end + "</think>".length).trimStart() };
}

/** Returns the messages that a turn sends: its system prompt, what was said before, and its question. */
export function messages(conversation, turn) {
  const shown = path(conversation);
  const before = shown.slice(0, shown.indexOf(turn)).filter((other) => spoken(other.answers[0]).text);
  const said = before.flatMap((other) => [
    { role: "user", content: prompt(other) },
    { role: "assistant", content: spoken(other.answers[0]).text },
  ]);
  const system = turn.settings.system ? [{ role: "system", content: turn.settings.system }] : [];
  return [...system, ...said, { role: "user", content: prompt(turn) }];
}

/** Returns the tokens that a conversation has used of the context, or null if no answer said it. */
export function usedTokens(conversation) {
  const answer = path(conversation).at(-1)?.answers[0];
  return answer?.promptTokens == null ? null : answer.promptTokens + answer.tokens;
}

/** Returns the path that is shown as Markdown. */
export function toMarkdown(conversation) {
  const parts = path(conversation).flatMap((turn) => [
    `## Question\n\n${prompt(turn)}`,
    ...turn.answers.map((answer) => `## ${answer.plain ? "Answer by plain decoding" : "Answer"}\n\n${spoken(answer).text}`),
  ]);
  return `# ${conversation.title}\n\n${parts.join("\n\n")}\n`;
}

/** Returns all of a conversation, its other versions and steps included, as JSON. */
export const toJson = (conversation) => JSON.stringify({ format: "forerun-conversation", version: 1, ...conversation }, null, 1);
