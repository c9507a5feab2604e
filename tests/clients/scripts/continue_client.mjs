// Continue's adapters, with the requests that its chat, its agent and its autocomplete make.
import assert from "node:assert/strict";
import { constructLlmApi } from "@continuedev/openai-adapters";
import { checkAgent, HELLO, KEY, MODEL, run, same, SERVER, TOKENS, URL, WEATHER } from "./tries.mjs";

const signal = AbortSignal.timeout(300_000);
const api = constructLlmApi({ provider: "openai", apiKey: KEY, apiBase: `${URL}/` });
const asked = { model: MODEL, messages: [{ role: "user", content: HELLO }], max_tokens: TOKENS, temperature: 0 };
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tool = { type: "function", function: { name: "get_weather", description: "Get the weather of a city.", parameters } };
// As the templates of its autocomplete end a completion.
const marks = ["endoftext", "fim_prefix", "fim_middle", "fim_suffix", "fim_pad", "repo_name", "file_sep", "im_start", "im_end"];
const words = ["function", "class", "module", "export", "import"];
const stop = [...marks.map((mark) => `<|${mark}|>`), "\n\n", "\r\n\r\n", "/src/", "#- coding: utf-8", "```", ...words.map((word) => `\n${word}`)];

async function text(stream) {
  let found = "";
  for await (const chunk of stream) found += chunk.choices[0]?.delta?.content ?? "";
  return found;
}

async function chats() {
  const whole = await api.chatCompletionNonStream({ ...asked, stream: false }, signal);
  return same(await text(api.chatCompletionStream({ ...asked, stream: true }, signal)), whole.choices[0].message.content);
}

async function providers() {
  for (const [provider, apiBase] of [["vllm", URL], ["lmstudio", `${URL}/`], ["llama.cpp", `${SERVER}/`], ["ollama", SERVER]]) {
    const other = constructLlmApi({ provider, apiKey: KEY, apiBase });
    const whole = await other.chatCompletionNonStream({ ...asked, stream: false }, signal);
    assert.ok(whole.choices[0].message.content, provider);
    assert.equal((await other.list())[0].id, MODEL, provider);
  }
}

async function autocomplete() {
  const prompt = "<|fim_prefix|>def add(a, b):\n    return <|fim_suffix|>\n<|fim_middle|>";
  const own = { model: MODEL, prompt, max_tokens: TOKENS, temperature: 0.01, stop };
  let streamed = "";
  for await (const chunk of api.completionStream({ ...own, stream: true }, signal)) streamed += chunk.choices[0]?.text ?? "";
  assert.equal(typeof streamed, "string");
  const whole = await api.completionNonStream({ ...own, stream: false, suffix: "" }, signal);
  assert.equal(typeof whole.choices[0].text, "string");
}

async function agent() {
  const messages = [{ role: "system", content: "You are an agent. You call tools to answer." }, { role: "user", content: WEATHER }];
  const own = { model: MODEL, messages, tools: [tool], parallel_tool_calls: false, temperature: 0, max_tokens: 200, stream: true };
  const calls = [];
  for await (const chunk of api.chatCompletionStream(own, signal)) {
    for (const delta of chunk.choices[0]?.delta?.tool_calls ?? []) {
      calls[delta.index] ??= { id: delta.id, type: "function", function: { name: delta.function.name, arguments: "" } };
      calls[delta.index].function.arguments += delta.function.arguments ?? "";
    }
  }
  messages.push({ role: "assistant", content: " ", tool_calls: calls });
  for (const { id } of calls) messages.push({ role: "tool", tool_call_id: id, content: "sunny" });
  const cities = calls.map((call) => JSON.parse(call.function.arguments).city);
  checkAgent(cities, await text(api.chatCompletionStream(own, signal)));
}

await run(["@continuedev/openai-adapters"], {
  chats,
  "providers vllm, lmstudio, llama.cpp, ollama": providers,
  autocomplete,
  agent,
});
