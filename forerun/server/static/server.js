// The server that serves the page: whether it is ready, its models, and its streams.

import { $, pause } from "./dom.js";

export const MAX_ERROR = 600; // characters

/** The server's models, of which there are none until it is ready, and the name of the one that is asked. */
export const server = { models: [], model: null };

/** Returns the tokens of the context of the model that is asked, or null: of others than the first, it is known later. */
export const contextLength = () => server.models.find((model) => model.id === server.model)?.max_model_len ?? null;

let connecting = false;

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

/** Waits until the server is ready, and tells the user what it waits for. `onChange` is called at both ends. */
export async function connect(onChange) {
  server.models = [];
  onChange();
  if (connecting) return;
  connecting = true;
  while (!(await isReady())) await pause(1000);
  connecting = false;
  onChange();
}

/** Returns whether the server is ready, and keeps the list of its models. */
async function isReady() {
  try {
    const health = await fetch("health", { cache: "no-store" });
    if (!health.ok) {
      say(await complaint(health), health.status === 503 ? " Waiting …" : "");
      return false;
    }
    const response = await listed();
    if (!response.ok) {
      const needsKey = response.status === 401;
      say(needsKey ? "The server wants an API key: see the settings." : await complaint(response));
      return false;
    }
    server.models = (await response.json()).data;
    say(server.models.length > 1 ? `${server.models.length} models are ready.` : `${server.models[0].id} is ready.`);
    return true;
  } catch {
    say("The server does not answer. Waiting …");
    return false;
  }
}

const listed = () => fetch("v1/models", { headers: headers(), cache: "no-store" });

/** Keeps the list of models as it is now. Returns the state of the model `id`, or null if the server does not say. */
export async function stateOf(id) {
  try {
    const response = await listed();
    if (response.ok && server.models.length) server.models = (await response.json()).data;
  } catch {
    // The answer that is waited for says what is wrong.
  }
  return server.models.find((model) => model.id === id)?.state ?? null;
}

/** Shows a status. Screen readers speak whenever it is written, so the same text is not written twice. */
export function say(text, more = "") {
  if ($("status").textContent !== text + more) $("status").textContent = text + more;
}

/** Yields the chunks of a chat's answer. Throws an Error that the user can read. */
export async function* chat(body, signal) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: headers(),
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) {
    const after = response.headers.get("Retry-After");
    throw new Error((await complaint(response)) + (after ? ` Try again in ${after} s.` : ""));
  }
  for await (const chunk of events(response)) {
    if (chunk.error) throw new Error(String(chunk.error.message).slice(0, MAX_ERROR));
    yield chunk;
  }
}

/** Returns how many tokens a text has, or null if the server does not say. */
export async function countTokens(prompt) {
  try {
    const body = JSON.stringify({ model: server.model, prompt, add_special_tokens: false });
    const response = await fetch("tokenize", { method: "POST", headers: headers(), body });
    return response.ok ? (await response.json()).count : null;
  } catch {
    return null;
  }
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
