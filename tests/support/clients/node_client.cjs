// OpenAI's client for Node: an answer, the same streamed, both as responses, and an error, as one line of JSON.
const { OpenAI, BadRequestError } = require("openai");

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const asked = { model, messages: [{ role: "user", content: "hello" }], max_tokens: 6, temperature: 0 };

async function main() {
  const [answer] = (await client.chat.completions.create(asked)).choices;
  let streamed = "";
  for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
    streamed += chunk.choices[0]?.delta?.content ?? "";
  }
  const own = { model, input: "hello", max_output_tokens: 6, temperature: 0 };
  const response = (await client.responses.create(own)).output_text;
  let events = "";
  for await (const event of await client.responses.create({ ...own, stream: true })) {
    if (event.type === "response.output_text.delta") events += event.delta;
  }
  const error = await client.chat.completions.create({ ...asked, max_tokens: 0 }).then(
    () => ({}),
    (raised) => {
      if (!(raised instanceof BadRequestError)) throw raised;
      return { status: raised.status, message: raised.message };
    },
  );
  const found = { answer: answer.message.content, reason: answer.finish_reason, streamed, response, events, error };
  console.log(JSON.stringify(found));
}

main();
