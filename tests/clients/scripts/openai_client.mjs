// OpenAI's client for Node.
import assert from "node:assert/strict";
import { BadRequestError, OpenAI } from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { checkAgent, checkPerson, checkRefusal, HELLO, KEY, MODEL, PERSON, run, same, TOKENS, URL, WEATHER } from "./tries.mjs";

const client = new OpenAI({ baseURL: URL, apiKey: KEY, maxRetries: 0 });
const Person = z.object({ job: z.enum(["engineer", "teacher"]), age: z.number().int().min(0).max(150) });
const asked = { model: MODEL, messages: [{ role: "user", content: HELLO }], max_tokens: TOKENS, temperature: 0 };
const response = { model: MODEL, input: HELLO, max_output_tokens: TOKENS, temperature: 0 };
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false };
const get_weather = { name: "get_weather", description: "Get the weather of a city.", parameters };

async function models() {
  const names = [];
  for await (const model of client.models.list()) names.push(model.id);
  assert.ok(names.includes(MODEL));
}

async function chats() {
  const [whole] = (await client.chat.completions.create(asked)).choices;
  let streamed = "";
  for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
    streamed += chunk.choices[0]?.delta?.content ?? "";
  }
  return same(streamed, whole.message.content);
}

async function responses() {
  const whole = (await client.responses.create(response)).output_text;
  let streamed = "";
  for await (const event of await client.responses.create({ ...response, stream: true })) {
    if (event.type === "response.output_text.delta") streamed += event.delta;
  }
  return same(streamed, whole);
}

async function tools() {
  for (const stream of [false, true]) {
    const calls = [];
    const run = ({ city }) => (calls.push(city), "sunny");
    const tool = { type: "function", function: { ...get_weather, parse: JSON.parse, function: run } };
    const messages = [{ role: "user", content: WEATHER }];
    const runner = client.chat.completions.runTools({ model: MODEL, messages, tools: [tool], stream, temperature: 0, max_tokens: 200 });
    checkAgent(calls, await runner.finalContent());
  }
}

async function responseTools() {
  const own = { model: MODEL, tools: [{ type: "function", strict: true, ...get_weather }], temperature: 0, max_output_tokens: 200 };
  const input = [{ role: "user", content: WEATHER }];
  const cities = [];
  let answer = "";
  for (let turn = 0; turn < 3 && !answer; turn++) {
    const response = await client.responses.create({ ...own, input });
    const calls = response.output.filter((item) => item.type === "function_call");
    input.push(...response.output);
    input.push(...calls.map(({ call_id }) => ({ type: "function_call_output", call_id, output: "sunny" })));
    cities.push(...calls.map((call) => JSON.parse(call.arguments).city));
    answer = response.output_text;
  }
  checkAgent(cities, answer);
}

async function parsed() {
  const input = [{ role: "user", content: PERSON }];
  const own = { model: MODEL, messages: input, temperature: 0, max_tokens: 200 };
  const form = { ...own, response_format: zodResponseFormat(Person, "person") };
  checkPerson((await client.chat.completions.parse(form)).choices[0].message.parsed);
  checkPerson((await client.chat.completions.stream(form).finalChatCompletion()).choices[0].message.parsed);
  const text = { format: zodTextFormat(Person, "person") };
  checkPerson((await client.responses.parse({ model: MODEL, input, text, temperature: 0, max_output_tokens: 200 })).output_parsed);
}

const refused = () => checkRefusal(client.chat.completions.create({ ...asked, max_tokens: 0 }), BadRequestError, (error) => error.status, "max_tokens");

await run(["openai"], { models, chats, responses, "`runTools`": tools, "tools in responses": responseTools, "`parse`": parsed, errors: refused });
