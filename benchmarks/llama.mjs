// Decodes with llama.cpp, in its best build for this processor: `npm install node-llama-cpp` in the repository's root.
// The first line of standard input names the models, each further line a prompt; each is answered with one line of JSON.
import process from "node:process";
import readline from "node:readline";
import {DraftSequenceTokenPredictor, InputLookupTokenPredictor, getLlama} from "node-llama-cpp";

const neutral = {topK: 0, minP: 0, repeatPenalty: false};
let llama, given;
const models = {};

async function model(path) {
    models[path] ??= await llama.loadModel({modelPath: path, gpuLayers: 0, useMmap: true});
    return models[path];
}

async function sequence(path) {
    const context = await (await model(path)).createContext({contextSize: given.length, threads: given.threads});
    return [context, context.getSequence()];
}

async function answer({mode, tokens, known = 0, most, ends, sampling}) {
    const contexts = [];
    const options = {};
    if (mode.draft) {
        const [context, draft] = await sequence(given.draft);
        contexts.push(context);
        if (known > 0)
            await draft.evaluateWithoutGeneratingNewTokens(tokens.slice(0, known));
        // With fewer tokens at least, it verifies what the draft has just then: nothing, if both share the processor.
        options.tokenPredictor = new DraftSequenceTokenPredictor(draft, {minTokens: mode.draft.maxTokens, ...mode.draft});
    } else if (mode.lookup) {
        options.tokenPredictor = new InputLookupTokenPredictor(mode.lookup);
        options.tokenPredictor.updateInputTokens(tokens); // it looks nowhere else
    }
    const context = await (await model(given.target)).createContext({
        contextSize: given.length, threads: given.threads
    });
    contexts.push(context);
    const own = context.getSequence(options);
    if (known > 0)
        await own.evaluateWithoutGeneratingNewTokens(tokens.slice(0, known));
    const found = [];
    let first;
    const begun = performance.now();
    for await (const token of own.evaluate(tokens.slice(known), {...neutral, ...sampling, yieldEogToken: true})) {
        found.push(token);
        first ??= (performance.now() - begun) / 1000; // the prompt is read by then
        if (found.length === most || ends.includes(token))
            break;
    }
    const seconds = (performance.now() - begun) / 1000;
    const {used} = own.tokenPredictions;
    for (const each of contexts)
        await each.dispose();
    return {tokens: found, seconds, first, forwards: found.length - used};
}

for await (const line of readline.createInterface({input: process.stdin})) {
    const asked = JSON.parse(line);
    let found;
    try {
        if (given == null) {
            given = asked;
            llama = await getLlama({build: "never", gpu: false, logLevel: "error", maxThreads: given.threads});
            found = {processor: llama.systemInfo};
        } else
            found = await answer(asked);
    } catch (error) {
        found = {error: String(error)};
    }
    process.stdout.write(JSON.stringify(found) + "\n");
}
process.exit(0);
