// Vercel's AI SDK by @ai-sdk/openai-compatible.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateObject, generateText, Output, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";
import { checkAgent, checkPerson, checkRefusal, HELLO, KEY, MODEL, PERSON, run, same, SPELLED, TOKENS, URL, WEATHER } from "./tries.mjs";

const own = { name: "forerun", baseURL: URL, apiKey: KEY, includeUsage: true };
const provider = createOpenAICompatible({ ...own, supportsStructuredOutputs: true });
const loose = createOpenAICompatible(own); // sends json_object in place of a schema
const plain = { temperature: 0, maxRetries: 0 };
const asked = { ...plain, model: provider(MODEL), prompt: HELLO, maxOutputTokens: TOKENS };
const schema = z.object({ job: z.enum(["engineer", "teacher"]), age: z.number().int().min(0).max(150) });
const person = { ...plain, schema, prompt: PERSON, maxOutputTokens: 200 };

async function joined(stream) {
  const found = [];
  for await (const piece of stream) found.push(piece);
  return found.join("");
}

async function texts() {
  const whole = await generateText(asked);
  const stream = streamText(asked);
  const streamed = await joined(stream.textStream);
  assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);
  return same(streamed, whole.text);
}

async function completions() {
  const own = { ...asked, model: provider.completionModel(MODEL) };
  return same(await joined(streamText(own).textStream), (await generateText(own)).text);
}

function weather(calls) {
  const inputSchema = z.object({ city: z.enum(["Oslo", "Rome"]) });
  const execute = ({ city }) => (calls.push(city), "sunny");
  return { get_weather: tool({ description: "Get the weather of a city.", inputSchema, execute }) };
}

async function tools() {
  const calls = [];
  const own = { ...plain, model: provider(MODEL), prompt: WEATHER, maxOutputTokens: 200, stopWhen: stepCountIs(4) };
  checkAgent(calls, (await generateText({ ...own, tools: weather(calls) })).text);
}

async function streamedTools() {
  const calls = [];
  const own = { ...plain, model: provider(MODEL), prompt: WEATHER, maxOutputTokens: 200, stopWhen: stepCountIs(4) };
  const stream = streamText({ ...own, tools: weather(calls) });
  const kinds = [];
  for await (const part of stream.fullStream) kinds.push(part.type);
  checkAgent(calls, await stream.text);
  assert.ok(kinds.includes("tool-input-start") && !kinds.includes("error"), String(kinds));
}

async function forced() {
  const calls = [];
  const own = { ...plain, model: provider(MODEL), prompt: WEATHER, maxOutputTokens: 200, toolChoice: "required" };
  await generateText({ ...own, tools: weather(calls) });
  assert.ok(calls.length);
}

const objects = async () => checkPerson((await generateObject({ ...person, model: provider(MODEL) })).object);

async function streamedObjects() {
  const stream = streamObject({ ...person, model: provider(MODEL) });
  for await (const part of stream.partialObjectStream) assert.equal(typeof part, "object");
  checkPerson(await stream.object);
}

async function outputs() {
  const own = { ...plain, model: provider(MODEL), prompt: PERSON, maxOutputTokens: 200 };
  const found = await generateText({ ...own, output: Output.object({ schema }) });
  checkPerson(found.output);
}

const looseObjects = async () => checkPerson((await generateObject({ ...person, prompt: SPELLED, model: loose(MODEL) })).object);

const refused = () => checkRefusal(generateText({ ...asked, topP: 2 }), APICallError, (error) => error.statusCode, "top_p");

await run(["ai", "@ai-sdk/openai-compatible"], {
  "`generateText`, `streamText`": texts,
  completions,
  tools,
  "tools, streamed": streamedTools,
  "forced calls": forced,
  "`generateObject`": objects,
  "`streamObject`": streamedObjects,
  "`Output.object`": outputs,
  "objects without a schema": looseObjects,
  errors: refused,
});
