// The runner of tools of OpenAI's client for Node, whole and streamed, as one line of JSON.
const { OpenAI } = require("openai");

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const called = [];

function tool(name, properties, run) {
  const parameters = { type: "object", properties };
  const call = (given) => {
    called.push([name, given]);
    return run(given);
  };
  return { type: "function", function: { name, description: name, parameters, parse: JSON.parse, function: call } };
}

async function main() {
  const tools = [
    tool("get_weather", { city: { type: "string" } }, () => "sunny"),
    tool("count", { x: { type: "integer" } }, ({ x }) => String(x + 1)),
  ];
  const answers = [];
  for (const stream of [false, true]) {
    const messages = [{ role: "user", content: "hello" }];
    answers.push(await client.chat.completions.runTools({ model, messages, tools, stream }).finalContent());
  }
  console.log(JSON.stringify({ called, answers }));
}

main();
