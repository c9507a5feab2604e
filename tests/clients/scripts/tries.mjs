// Tries of a client, one after the other, each told as a line of JSON: tries.py for Node.
// The scripts run as `node SCRIPT URL MODEL`. URL is that of the server, without /v1.
import assert from "node:assert/strict";
import { existsSync, readFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

export const [SERVER, MODEL] = process.argv.slice(2);
export const URL = `${SERVER}/v1`;
export const KEY = "none";
export const HELLO = "Say hello.";
export const WEATHER = "What is the weather in Oslo? Use the tool.";
export const PERSON = "Ada is 36 years old and an engineer.";
// For modes that send no schema.
export const SPELLED = `${PERSON} Answer with JSON alone: job, which is engineer or teacher, and age.`;
export const JOBS = ["engineer", "teacher"];
export const TOKENS = 12; // of a plain answer

// Packages do not let their package.json be imported, so it is looked for beside this file.
function version(name) {
  let folder = dirname(fileURLToPath(import.meta.url));
  while (!existsSync(join(folder, "node_modules", name))) folder = dirname(folder);
  return JSON.parse(readFileSync(join(folder, "node_modules", name, "package.json"))).version;
}

async function outcome(work) {
  try {
    return { passed: true, text: (await work()) ?? null };
  } catch (error) {
    console.error(error);
    return { passed: false, text: `${error.name}: ${error.message}`.slice(0, 1000) };
  }
}

// Runs tries, and tells the versions of packages. A try throws if it fails. The text that one may return is told too.
export async function run(packages, tries) {
  const versions = Object.fromEntries(packages.map((name) => [name, version(name)]));
  console.log(JSON.stringify({ versions }));
  for (const [tried, work] of Object.entries(tries)) console.log(JSON.stringify({ tried, ...(await outcome(work)) }));
}

// Returns an answer that is the same streamed and whole, and not empty.
export function same(streamed, whole) {
  assert.ok(whole, "an empty answer");
  assert.equal(streamed, whole);
  return whole;
}

// Checks that the schema of PERSON was kept.
export function checkPerson({ job, age }) {
  assert.ok(JOBS.includes(job), job);
  assert.ok(Number.isInteger(age) && age >= 0 && age <= 150, String(age));
}

// Checks that an agent called the tool of WEATHER and said something after it.
export function checkAgent(calls, answer) {
  assert.ok(calls.length, "no tool was called");
  assert.ok(calls.every((city) => city === "Oslo"), String(calls));
  assert.ok(answer, "no answer after the call");
}

// Checks that a client shows a refusal of the server as its own error, with our message, which names the field.
export async function checkRefusal(promise, kind, status, field) {
  const error = await promise.then(() => assert.fail("it was not refused"), (raised) => raised);
  assert.ok(error instanceof kind, String(error));
  assert.equal(status(error), 400);
  assert.ok(error.message.includes(field), error.message);
}
